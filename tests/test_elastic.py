"""Which hosts an elastic job runs on, and which options it refuses; processes: tests/processes/test_elastic.py."""

import os
import subprocess
import sys

import pytest

from tfdist.errors import ClusterError, UsageError
from tfdist.launcher import elastic, job


def members(listed, least=1, most=None):
    """Those of a list that a test changes."""
    return elastic.Members(lambda: tuple(listed), least, most)


def test_a_job_runs_on_what_is_listed_up_to_its_most_workers():
    listed = ["a", "a", "b"]
    assert members(listed).now() == ("a", "a", "b")
    assert members(listed, most=2).now() == ("a", "a")


def test_a_new_host_does_not_push_out_one_that_has_been_there():
    listed = ["b"]
    there = members(listed, most=2)
    assert there.now() == ("b",)
    listed[:] = ["a", "c", "b"]
    assert there.now() == ("b", "a")


def test_the_place_of_a_lost_worker_is_left_out_until_its_host_s_entry_changes():
    listed = ["a", "a", "b"]
    there = members(listed)
    there.lose("a")
    assert there.now() == ("a", "b")
    there.lose("b")
    assert there.now() == ("a",)
    listed.append("c")
    assert there.now() == ("a", "c")
    listed.remove("b")
    assert there.now() == ("a", "c")
    listed.append("b")
    assert there.now() == ("a", "b", "c")


def test_a_list_that_cannot_be_read_for_a_moment_is_as_it_was(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    there = elastic.Members(lambda: job.read_hostfile(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("a slots=\n")
    assert there.now() == ("a", "a")
    (tmp_path / "hosts").unlink()
    assert there.now() == ("a", "a")


def test_a_list_that_cannot_be_read_at_the_start_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"hosts` cannot be read"):
        elastic.Members(lambda: job.read_hostfile(tmp_path / "hosts"))
    with pytest.raises(UsageError, match=r"The host discovery script .* failed"):
        elastic.Members(lambda: elastic.discovered_hosts(tmp_path / "hosts"))


def test_a_script_is_asked_as_horovod_asks_it(tmp_path):
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho a:2\necho b\n")
    script.chmod(0o755)
    assert elastic.Members(lambda: elastic.discovered_hosts(script)).now() == ("a", "a", "b")


def test_too_few_hosts_are_waited_for():
    listed = ["a"]
    with pytest.raises(ClusterError, match="slots for 1 workers, and the job needs 2: waited 0 s"):
        members(listed, least=2).wait(0)
    listed.append("b")
    assert members(listed, least=2).wait(0) == ("a", "b")


@pytest.mark.parametrize(
    ("least", "most", "message"), [(0, None, "`--min-workers` is 0"), (3, 2, "`--max-workers` is 2, and")]
)
def test_numbers_that_cannot_be_are_refused(least, most, message):
    with pytest.raises(UsageError, match=message):
        members(["a"], least, most)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-workers", "2"], "`--min-workers` is set, but the job is not elastic"),
        (["--hostfile", "hosts"], "`--hostfile` is set, but the job is not elastic"),
        (["--elastic", "--workers", "2"], "`--workers` and `--elastic` are both set"),
        (["--elastic", "--hostfile", "a", "--host-discovery-script", "b"], "are both set"),
        (["--elastic", "--hostfile", "nowhere"], "The host file `nowhere` cannot be read"),
        (["--elastic", "--strategy", "single"], "the number of workers of `single` is fixed"),
        (["--checkpoint-steps", "0"], "`--checkpoint-steps` is 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused_at_once(options, message, tmp_path):
    command = [
        sys.executable,
        "-m",
        "tfdist.train",
        "--strategy",
        "multiworker",
        "--model",
        "mlp",
        "--dataset",
        "digits",
    ]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
