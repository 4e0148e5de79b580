"""What bug reports and records leave out."""

import json

import pytest
from click.testing import CliRunner

from tfdist import launch, redaction, train
from tfdist.doctor.finding import note
from tfdist.run import schema

SECRET = "hunter2"


@pytest.mark.parametrize(
    "name",
    [
        *("TFDIST_CRED", "TF_PW", "HOROVOD_PASSPHRASE", "TFDIST_SECRET", "TFDS_TOKEN", "KERAS_API_KEY", "PGPASSWORD"),
        *(
            "authToken",
            "--password",
            "api-key",
            "TF_PWD",
            "HOROVOD_SECRET_KEY",
            "TFDIST_CREDENTIALS",
            "TF_AUTH_2",
            "TF_GH_PAT",
            "psw",
        ),
    ],
)
def test_a_value_is_secret_by_its_name(name):
    assert redaction.is_secret(name, SECRET)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TFDIST_SECRET_FILE", "/run/secret"), ("key_dim", "64"), ("num_tokens", "512"), ("tokenizer", "bpe")]
    + [(name, "x") for name in ("XLA_FLAGS", "OMP_PROC_BIND", "PYTHONPATH", "author", "keyword", "compass")],
)
def test_other_values_are_shown(name, value):
    assert not redaction.is_secret(name, value)


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@proxy:3128",
        f"http://me:{SECRET}@{SECRET}@proxy:3128",
        f"me:{SECRET}@proxy:3128",
        f"https://example.com/data?token={SECRET}&size=1",
        f"https://account.blob.core.windows.net/data?sv=2024&sig={SECRET}",
        f"https://hooks.slack.com/services/T00/B00/{SECRET}",
        f"python train.py --password {SECRET} --epochs 1",
        f"python train.py '--password={SECRET} {SECRET}' --epochs 1",
        f"python train.py --data-option token={SECRET} --data-option=token={SECRET}",
        f"a 'broken quote --password {SECRET}",
        f"Authorization: Bearer {SECRET}",
        json.dumps({"cluster": {"worker": ["a:1"]}, "rpc": {"password": [SECRET, SECRET], "url": f"x://{SECRET}@a"}}),
        f'{{"cluster": {{"worker": ["a:1"], "password": ["{SECRET}", "{SECRET}',
        f"`TF_CONFIG` is `{{'password': '{SECRET}'}}`, which is not JSON",
    ],
)
def test_a_value_is_secret_by_its_form(text):
    hidden = redaction.hide(text)
    assert SECRET not in hidden
    assert redaction.hide(hidden) == hidden


@pytest.mark.parametrize(
    "token",
    ["ghp_" + "a1" * 18, "hf_" + "a1" * 17, "AKIA" + "A1" * 8, "eyJhbGciOiJI.eyJzdWIiOiIx.c2ln", "sk-" + "a1" * 16],
)
def test_a_token_is_secret_by_its_form(token):
    assert token not in redaction.hide(f"value {token} end")


@pytest.mark.parametrize(
    "text",
    [
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}',
        "python -m tfdist.train --model 'my model' --model-option key_dim=64 --hosts me@a:2,me@b:2",
        "/usr/bin:/usr/local/bin",
        "--xla_gpu_cuda_data_dir=/usr/local/cuda --tf_xla_auto_jit=2",
        "",
    ],
)
def test_other_texts_are_unchanged(text):
    assert redaction.hide(text) == text


def test_a_record_of_a_run_has_no_secrets():
    record = schema.example()
    record.command = ["tfdist", "train", "--data-option", f"token={SECRET}", "--model", "cnn"]
    record.typed = [f"python -m tfdist.train --data-option token={SECRET} --model cnn"]
    record.reason = f"no connection to http://me:{SECRET}@proxy:3128"
    record.dataset.options = {"token": SECRET, "size": "64"}
    record.strategy.options = {"password": SECRET, "workers": 2}
    assert SECRET not in record.model_dump_json()
    assert record.command[4:] == ["--model", "cnn"]
    assert record.dataset.options["size"] == "64" and record.strategy.options["workers"] == 2


def test_a_finding_of_the_doctor_has_no_secrets():
    finding = note("network", f"`https_proxy` is `http://me:{SECRET}@proxy:1`", f"unset --password {SECRET}")
    assert SECRET not in finding.sentence + finding.hint


def test_resuming_a_run_asks_for_the_secret_that_its_record_leaves_out(tmp_path):
    record = schema.example()
    record.command = ["tfdist", "train", "--data-option", f"token={SECRET}", "--model", "mlp", "--dataset", "digits"]
    record.command += ["--strategy", "single"]
    (tmp_path / "run.json").write_text(record.model_dump_json())
    done = CliRunner().invoke(train.command, ["--resume", "--run-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "has no secret values, and leaves out one of `--data-option`" in done.output


def test_a_printed_job_warns_of_the_secret_in_its_command():
    arguments = ["--workers", "2", "--emit", "slurm", "script.py", "--password", SECRET]
    done = CliRunner().invoke(launch.command, arguments)
    assert done.exit_code == 0
    assert "warning: The command has a password, a token or a key" in done.stderr and SECRET in done.stdout
    quiet = CliRunner().invoke(launch.command, arguments[:-2])
    assert not quiet.stderr
