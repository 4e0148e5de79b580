"""What a launcher is told: hosts and their processes, and the command that follows from it."""

import pytest

from tfdist.errors import UsageError
from tfdist.jobs.world import World
from tfdist.launcher.job import Job, new_name, parse_hosts, read_hostfile


def test_jobs_of_one_second_have_names_of_their_own():
    assert len({new_name() for _ in range(1000)}) == 1000


def mark(rank, environment):
    return new_name(World(rank, 2, rank, 2, "mpirun of Open MPI"), environment).rpartition("-")[2]


@pytest.mark.parametrize("variable", ["PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_PORT"])
def test_processes_that_mpirun_starts_give_their_job_the_same_name_and_another_job_another(variable):
    one, other = {variable: "1485570049"}, {variable: "1485570050"}
    assert mark(0, one) == mark(1, one) != mark(0, other)


def test_hosts_are_named_as_often_as_they_get_processes():
    assert parse_hosts("a:2, b,c:1,") == ("a", "a", "b", "c")
    assert parse_hosts("") == ()
    assert parse_hosts("[fd00::1]:2,10.0.0.2,node-7.example.org:1") == (
        "[fd00::1]",
        "[fd00::1]",
        "10.0.0.2",
        "node-7.example.org",
    )


@pytest.mark.parametrize(
    "text", ["a:", "a:0", "a:two", "a b", ":2", "-V", "-oProxyCommand=x:2", "a;b", "me@a", "fd00::1", "[a]", "[]"]
)
def test_a_host_that_cannot_be_understood_is_shown(text):
    with pytest.raises(UsageError, match="is not a host with its number of processes"):
        parse_hosts(text)


def test_a_host_file_is_read_as_mpirun_reads_it(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two machines\ngpu1 slots=2\n\ngpu2   slots=1  # the small one\ngpu3\n")
    assert read_hostfile(file) == ("gpu1", "gpu1", "gpu2", "gpu3")


def test_a_host_file_names_no_option(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("-V slots=2\n")
    with pytest.raises(UsageError, match="`-V slots=2` is not a host"):
        read_hostfile(file)


def test_a_host_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere` cannot be read: No such file"):
        read_hostfile(tmp_path / "nowhere")


def test_mpirun_gets_the_hosts_with_their_counts_and_the_ssh_options(tmp_path, monkeypatch):
    for program in ("mpirun", "ssh"):
        (tmp_path / program).write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = Job(("script.py",), workers=3, hosts=("a", "a", "b"), mpi=True, ssh_options=("-p", "2222")).argv()
    assert argv[:3] == ["mpirun", "-np", "3"]
    assert argv[argv.index("--host") + 1] == "a:2,b:1"
    assert argv[argv.index("plm_rsh_args") + 1].startswith("-o BatchMode=yes -p 2222 ")
    assert argv[-1] == "script.py"


@pytest.mark.parametrize("mpi", [False, True])
def test_without_ssh_other_hosts_are_refused(monkeypatch, mpi):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="There is no `ssh` on the path"):
        Job(("script.py",), hosts=("a", "b"), mpi=mpi).argv()


def test_mpi_has_no_parameter_servers():
    with pytest.raises(UsageError, match="MPI has no parameter servers"):
        Job(("script.py",), ps=1, mpi=True)
