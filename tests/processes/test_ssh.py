"""The launcher over a real ssh: two hosts, each with a server of OpenSSH, and what is left on them."""

import contextlib
import shutil
import signal
import time

import pytest

from tests.processes.hosts import ADDRESSES, Hosts
from tests.processes.jobs import RunningJob, epochs_done, free_addresses, record
from tests.processes.ssh import Ssh

EXHAUSTIVE = pytest.mark.exhaustive
NEEDS_MPI = pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no `mpirun`: run `make horovod`")

SAY = """
import os
from tfdist.world import World
world = World.detect()
# In one piece, since the others write there too.
os.write(1, f"{world.named(world.rank)} {world.local_rank} {'SSH_CONNECTION' in os.environ}\\n".encode())
"""
WAIT = "import os, time\nprint('here', flush=True)\ntime.sleep(100)\n"


class FarHosts(Hosts):
    """Two hosts with a server each; the launcher is started on the first."""

    def __init__(self, folder):
        super().__init__()
        self.ssh = Ssh(folder, 22)

    def open(self):
        self.ssh.prepare()
        super().open()
        for index, address in enumerate(ADDRESSES):
            self.ssh.serve(address, self.inside(index))

    def inside(self, index):
        # MPI names its shared memory after the host, and takes hosts of one name for one.
        named = ("unshare", "--uts", "sh", "-c", f'hostname host-{index} && exec "$0" "$@"')
        return (*super().inside(index), *named)

    def launch(self, *arguments, cwd, key="right", places=(1, 1)):
        hosts = ",".join(f"{address}:{count}" for address, count in zip(ADDRESSES, places, strict=True))
        options = ("--hosts", hosts, *self.ssh.options(key))
        return RunningJob(*options, *arguments, cwd=cwd, inside=self.inside(0))

    def program(self, index):
        """The user's program on one of the hosts, once it runs."""
        found = [process for process in self.ssh.processes(index) if "tfdist.launcher.script" in process.cmdline()]
        return found[-1] if found else None

    def is_empty(self):
        return not any(self.ssh.processes(index) for index in range(len(ADDRESSES)))

    def close(self):
        self.ssh.close()
        super().close()


@pytest.fixture
def hosts(tmp_path):
    with contextlib.closing(FarHosts(tmp_path)) as found:
        found.open()
        yield found


def output(tmp_path, name):
    """What one process has written so far."""
    return "".join(path.read_text() for path in tmp_path.glob(f"logs/*/{name}.log"))


def soon(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    return condition()


def test_names_of_this_machine_are_reached_over_ssh_too(tmp_path, script):
    """Without network namespaces, which only root can make; what the servers say first is no harm."""
    (port,) = (int(address.rpartition(":")[2]) for address in free_addresses(1))
    with contextlib.closing(Ssh(tmp_path, port)) as ssh:
        ssh.prepare()
        for address in ("127.0.0.1", "127.0.0.2"):
            ssh.serve(address)
        arguments = ("--hosts", "localhost,127.0.0.2", *ssh.options(), script(SAY))
        with RunningJob(*arguments, cwd=tmp_path) as job:
            code, out, err = job.end()
    assert code == 0, err
    assert out.startswith("worker 0 (localhost:") and out.endswith(" 0 True\n")
    said = output(tmp_path, "worker-1")
    assert said.startswith("This host greets you.\nworker 1 (127.0.0.2:") and said.endswith(" 1 True\n")


def test_two_hosts_train_together(hosts, tmp_path):
    """That it equals a training on one host is shown in test_two_hosts.py, where TF_CONFIG says the same."""
    run_dir = tmp_path / "run"
    options = ("--strategy", "multiworker", "--model", "mlp", "--dataset", "digits", "--epochs", "2")
    with hosts.launch("-m", "tfdist.train", *options, "--run-dir", run_dir, cwd=tmp_path) as job:
        code, _, err = job.end()
    assert code == 0, err
    found = record(run_dir)
    assert len(found["epochs"]) == 2
    assert [process["differing_metrics"] for process in found["processes"]] == [None, None]
    assert hosts.is_empty()


def test_a_process_that_is_killed_on_the_other_host_ends_all(hosts, tmp_path, script):
    with hosts.launch(script(WAIT), cwd=tmp_path) as job:
        job.wait_for(lambda: "here" in output(tmp_path, "worker-1"))
        hosts.program(1).kill()
        code, _, err = job.end()
        assert job.left() == [] and soon(hosts.is_empty)
    assert code == 128 + signal.SIGKILL
    assert "worker 1 was ended by SIGKILL; its last lines" in err and "│ here" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_on_either_host_when_the_launcher_ends(hosts, tmp_path, script, number):
    with hosts.launch(script(WAIT), cwd=tmp_path) as job:
        job.wait_for(lambda: all("here" in output(tmp_path, f"worker-{index}") for index in range(2)))
        began = time.monotonic()
        job.signal(number)
        code, _, _ = job.end()
        assert soon(lambda: hosts.is_empty() and not job.left())
        assert time.monotonic() - began < 10
    assert code == (130 if number == signal.SIGINT else -signal.SIGKILL)


@pytest.mark.parametrize("more", [(), pytest.param(("--mpi",), marks=NEEDS_MPI)], ids=["launcher", "mpirun"])
def test_a_key_that_is_not_let_in_is_told_without_a_question(hosts, tmp_path, script, more):
    began = time.monotonic()
    with hosts.launch(*more, script(SAY), cwd=tmp_path, key="wrong") as job:
        code, _, err = job.end()
    assert time.monotonic() - began < 30
    assert code != 0
    assert f"@{ADDRESSES[bool(more)]}: Permission denied (publickey)" in err and "Traceback" not in err


@EXHAUSTIVE
def test_a_host_that_is_cut_off_is_given_up(hosts, tmp_path, script):
    with hosts.launch(script(WAIT), cwd=tmp_path) as job:
        job.wait_for(lambda: "here" in output(tmp_path, "worker-1"))
        hosts.cut()
        began = time.monotonic()
        code, _, err = job.end()
        assert time.monotonic() - began < 40
        assert job.left() == []
    assert code == 255
    assert "worker 1 ended with exit code 255" in err and f"server {ADDRESSES[1]} not responding" in err


@NEEDS_MPI
class TestMpirun:
    def test_it_starts_processes_on_the_other_host_which_share_its_cores(self, hosts, tmp_path, script):
        with hosts.launch("--mpi", "--workers", "3", script(SAY), cwd=tmp_path, places=(2, 1)) as job:
            code, out, err = job.end()
        assert code == 0, err
        assert sorted(out.splitlines()) == ["rank 0 0 False", "rank 1 1 False", "rank 2 0 True"]
        assert hosts.is_empty()

    @EXHAUSTIVE
    @pytest.mark.parametrize("places", [(1, 1), (2, 1)], ids=str)
    @pytest.mark.parametrize("strategy", ["horovod", "mpi_split"])
    def test_two_hosts_train_together(self, hosts, tmp_path, strategy, places):
        if strategy == "horovod":
            pytest.importorskip("horovod", reason="Horovod is not installed: run `make horovod`")
        options = ("--strategy", strategy, "--model", "mlp", "--dataset", "digits", "--epochs", "1")
        options += ("--timeout-seconds", "100", "--run-dir", tmp_path / "run")
        workers = ("--workers", str(sum(places)))
        with hosts.launch("--mpi", *workers, "-m", "tfdist.train", *options, cwd=tmp_path, places=places) as job:
            code, _, err = job.end()
        assert code == 0, err
        world = record(tmp_path / "run")["world"]
        assert (world["world_size"], world["local_world_size"]) == (sum(places), places[0])

    @EXHAUSTIVE
    @pytest.mark.parametrize("end", ["its process is killed", "Ctrl-C"])
    def test_nothing_is_left_on_the_other_host(self, hosts, tmp_path, end):
        run_dir = tmp_path / "run"
        options = ("-m", "tfdist.train", "--strategy", "mpi_split", "--model", "mlp", "--dataset", "digits")
        with hosts.launch("--mpi", *options, "--epochs", "2000", "--run-dir", run_dir, cwd=tmp_path) as job:
            job.wait_for(lambda: epochs_done(run_dir) >= 2)
            if end == "Ctrl-C":
                job.signal(signal.SIGINT)
            else:
                hosts.program(1).kill()
            began = time.monotonic()
            code, out, err = job.end()
            assert time.monotonic() - began < 30
            assert soon(lambda: hosts.is_empty() and not job.left())
        assert code == 130 if end == "Ctrl-C" else "rank 1 with PID" in out + err
