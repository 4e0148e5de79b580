"""What `--on ray` refuses before a cluster is asked; tests/processes/test_ray.py has the jobs."""

import sys

import pytest
from click.testing import CliRunner

from tfdist import launch, train

TRAIN = ["--model", "mlp", "--dataset", "digits", "--run-dir", "run"]


def run(command, options, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = CliRunner().invoke(command, options)
    assert done.exit_code == 2, done.output
    assert "hint: " in done.output
    return done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on", "spark"], "`--on` is `spark`"),
        (["--mpi"], "`--mpi` is set with `--on ray`, which starts the processes itself"),
        (["--hosts", "a,b"], "`--hosts` is set with `--on ray`, which starts the processes itself"),
        (["--elastic"], "`--on` and `--elastic` are both set"),
        (["--emit", "slurm"], "`--on ray` and `--emit slurm` are both set"),
    ],
)
def test_options_of_the_launcher_that_exclude_each_other_are_refused(options, said, monkeypatch, tmp_path):
    assert said in run(launch.command, ["--on", "ray", *options, "script.py"], monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "mirrored"], "`--on ray` is set, but `mirrored` trains in one process"),
        (["--strategy", "mpi"], "`--on ray` is set, but `mpi` is started by `mpirun`"),
        (["--strategy", "horovod", "--elastic"], "`--on ray` and `--elastic` are both set"),
    ],
)
def test_a_strategy_that_cannot_be_started_on_a_cluster_is_refused(options, said, monkeypatch, tmp_path):
    assert said in run(train.command, ["--on", "ray", *options, *TRAIN], monkeypatch, tmp_path)


def test_a_ray_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "tfdist.launcher.on_ray", raising=False)
    said = run(launch.command, ["--on", "ray", "script.py"], monkeypatch, tmp_path)
    assert "`--on ray` needs the package `ray`, which is not installed" in said


def test_the_callback_without_ray_is_refused_in_a_sentence(monkeypatch):
    import tfdist
    from tfdist.errors import UsageError

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "tfdist.ray", raising=False)
    with pytest.raises(UsageError, match=r"`tfdist\.ray` needs the package `ray`, which is not installed"):
        tfdist.ray.Report()


@pytest.mark.parametrize("address", ["node1", "atuo", "node1:", ":6379", "node1:port"])
def test_an_address_of_no_cluster_is_refused_in_a_sentence(address, monkeypatch, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: `pip install 'ray[train,tune]'`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", address)
    done = CliRunner().invoke(launch.command, ["--on", "ray", "script.py"])
    assert done.exit_code == 2, done.output
    assert f"`RAY_ADDRESS` is `{address}`, which is not `HOST:PORT`" in done.output and "hint: set it to" in done.output
