"""The secret of a job: where it comes from, and that a wrong one proves nothing."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.errors import UsageError
from tfdist.jobs import secret
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World

HERE = World(0, 2, 0, 2, "TF_CONFIG", (Task("worker", 0, "localhost:1"), Task("worker", 1, "localhost:2")))
HOSTS = World(0, 2, 0, 1, "TF_CONFIG", (Task("worker", 0, "a:1"), Task("worker", 1, "b:1")))
LONG = "0123456789abcdef"


def written(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return {"TFDIST_SECRET_FILE": str(path)}


def test_the_variable_comes_before_the_file(tmp_path):
    environment = written(tmp_path / "secret", "x" * 16)
    assert secret.of_job(HOSTS, environment) == b"x" * 16
    assert secret.of_job(HOSTS, {"TFDIST_SECRET": LONG, **environment}) == LONG.encode()


def test_hosts_without_a_secret_have_none_and_processes_of_one_host_share_that_of_the_user(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    assert secret.of_job(HOSTS, environment) == b""
    with ThreadPoolExecutor(8) as pool:
        (shared,) = set(pool.map(lambda _: secret.of_job(HERE, environment), range(8)))
    assert len(shared) >= 32
    (path,) = (tmp_path / "tfdist").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_of_the_user_that_others_can_read_is_no_secret(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    secret.of_job(HERE, environment)
    (tmp_path / "tfdist" / "secret").chmod(0o644)
    assert secret.of_job(HERE, environment) == b""


def test_a_folder_that_cannot_be_written_gives_no_secret(tmp_path):
    (tmp_path / "tfdist").write_text("a file")
    assert secret.of_job(HERE, {"XDG_CACHE_HOME": str(tmp_path)}) == b""


@pytest.mark.parametrize(
    ("text", "mode", "shown"),
    [
        (LONG, 0o644, "only its owner can access"),
        (LONG, 0o620, "only its owner can access"),
        ("short", 0o600, "has 5 bytes"),
        (None, 0o600, "cannot be read: No such file"),
    ],
)
def test_a_secret_file_that_keeps_no_secret_is_refused(tmp_path, text, mode, shown):
    path = tmp_path / "secret"
    environment = {"TFDIST_SECRET_FILE": str(path)} if text is None else written(path, text, mode)
    with pytest.raises(UsageError, match=shown) as raised:
        secret.of_job(HOSTS, environment)
    assert str(path) in raised.value.sentence


def test_a_fifo_in_place_of_the_secret_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(UsageError, match="only its owner can access"):
        secret.of_job(HOSTS, {"TFDIST_SECRET_FILE": str(tmp_path / "secret")})


def test_a_proof_is_valid_for_its_challenges_alone():
    accepting, opening = secret.Acceptance(b"key"), secret.Opening(b"key")
    proof = opening.respond(accepting.challenge())
    response = accepting.respond(proof)
    assert opening.is_proved_by(response)
    assert secret.Acceptance(b"key").respond(proof) is None
    assert not secret.Opening(b"key").is_proved_by(response)


def test_an_accepting_process_without_the_secret_is_noticed():
    impostor, opening = secret.Acceptance(b"guess"), secret.Opening(b"key")
    assert impostor.respond(opening.respond(impostor.challenge())) is None
    assert not opening.is_proved_by(b"") and not opening.is_proved_by(None)
