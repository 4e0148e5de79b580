"""The emitted script under a real Slurm: a controller and three nodes, on this machine and in a folder of their own."""

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes.jobs import free_ports
from tfdist.launcher import emit
from tfdist.launcher.job import Job
from tfdist.run.folder import load_record

# Daemons lie where only an administrator looks.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: run scripts/install_slurm.sh"),
]

# `two` are nodes in name only, so that one machine can show where tasks are put; `one` can be reached by its name.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# Ports follow from a job's number, and other such clusters may run on this machine.
FirstJobId={first_job}
# A job that was put back starts when the permission of its last start has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=5
# However many cores the machine has, a node has two.
SlurmdParameters=config_overrides
MailProg=/bin/true
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 State=UNKNOWN
PartitionName=two Nodes=n1,n2 Default=YES
PartitionName=one Nodes=localhost
"""


class Slurm:
    """A cluster of this test alone."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {"PATH": PATH, "HOME": os.environ.get("HOME", "/"), "SLURM_CONF": f"{folder}/slurm.conf"}
        self.daemons = []

    def start(self):
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname().partition(".")[0],
                user=getpass.getuser(),
                folder=self.folder,
                ports=free_ports(4),
                first_job=random.randrange(1, 600),
            )
        )
        for name in ("state", "spool-n1", "spool-n2", "spool-localhost"):
            (self.folder / name).mkdir()
        files = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file", "log-file")]
        files += [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "seed-file")]
        self.daemon("munged", "--foreground", "--force", *files)
        self.daemon("slurmctld", "-D")
        for node in ("n1", "n2", "localhost"):
            self.daemon("slurmd", "-D", "-N", node)
        self.wait(lambda: self.run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * 3, 30.0)

    def daemon(self, name, *arguments):
        with (self.folder / f"{name}-{len(self.daemons)}.out").open("w") as output:
            self.daemons.append(
                subprocess.Popen(
                    [shutil.which(name, path=PATH), *arguments],
                    env=self.environment,
                    cwd=self.folder,
                    stdout=output,
                    stderr=output,
                )
            )

    def stop(self):
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            self.run("scancel", "--user", getpass.getuser())
            self.wait(lambda: not self.run("squeue", "--noheader"), 30.0)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, *command):
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=30, check=False
        )
        return done.stdout

    def submit(self, job, *options):
        """The number of a job that was handed in."""
        script = self.folder / "job.sh"
        script.write_text(emit.slurm(job))
        return self.run("sbatch", "--parsable", *options, str(script)).strip()

    def state(self, number):
        return re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", number))[0]

    def output(self, number):
        path = self.folder / f"tfdist-{number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def end(self, number):
        """The state and the output of a job that has ended."""
        self.wait(lambda: self.state(number) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING"))
        return self.state(number), self.output(number)

    def wait(self, until, seconds=120.0):
        end = time.monotonic() + seconds
        while not until():
            logs = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out")]
            assert time.monotonic() < end, "\n".join(logs)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm():
    # A socket's path is short, and pytest's folders are not.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def seen(output, rank):
    (line,) = re.findall(rf"^{rank}: rank (\d+) +(\w+ \d+) \((\w+):\d+\), this process", output, re.MULTILINE)
    return line


def test_every_process_knows_who_it_is(slurm):
    state, output = slurm.end(slurm.submit(Job(("-m", "tfdist.world"), workers=2)))
    assert state == "COMPLETED", output
    assert [seen(output, rank) for rank in range(2)] == [("0", "worker 0", "n1"), ("1", "worker 1", "n2")]


def test_several_processes_share_a_node(slurm):
    number = slurm.submit(Job(("-m", "tfdist.world"), workers=2, ps=1), "--nodes=2")
    state, output = slurm.end(number)
    assert state == "COMPLETED", output
    assert [seen(output, rank) for rank in range(4)] == [
        ("0", "chief 0", "n1"),
        ("1", "worker 0", "n1"),
        ("2", "worker 1", "n2"),
        ("3", "ps 0", "n2"),
    ]


def test_one_failure_ends_the_job_and_starts_it_again(slurm):
    program = """if True:
        import os, sys, time
        print("start", os.environ["TFDIST_JOB"], os.environ["TFDIST_RESTART"], flush=True)
        time.sleep(1 if os.environ["SLURM_PROCID"] == "1" else 600)
        sys.exit(3)
    """
    number = slurm.submit(Job(("-c", program), workers=2, restarts=1))
    state, output = slurm.end(number)
    assert state == "FAILED"
    starts = re.findall(r"^(\d: start slurm-\d+ \d)$", output, re.MULTILINE)
    assert sorted(starts[:2]) == [f"0: start slurm-{number} 0", f"1: start slurm-{number} 0"]
    assert sorted(starts[2:]) == [f"0: start slurm-{number} 1", f"1: start slurm-{number} 1"]


def test_a_job_that_is_cancelled_does_not_start_again(slurm):
    number = slurm.submit(Job(("-c", "import time; print('start', flush=True); time.sleep(600)"), restarts=3))
    slurm.wait(lambda: slurm.output(number).count("start") == 2)
    slurm.run("scancel", number)
    state, output = slurm.end(number)
    assert state == "CANCELLED"
    assert "putting it back" not in output


@pytest.mark.exhaustive
def test_a_run_goes_on_after_a_failure(slurm):
    folder = slurm.folder / "run"
    # Rank 1 dies when the first epoch has been saved, the first time.
    program = """if True:
        import os, pathlib, runpy, signal, sys, threading, time
        def die(folder):
            while not list(folder.glob("checkpoints/*.ckpt")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ["TFDIST_RESTART"] == "0" and os.environ["SLURM_PROCID"] == "1":
            threading.Thread(target=die, args=[pathlib.Path(sys.argv[-1])], daemon=True).start()
        runpy.run_module("tfdist.train", run_name="__main__", alter_sys=True)
    """
    options = ["--dataset", "synthetic", "--model", "mlp", "--epochs", "6", "--quiet", "--run-dir", str(folder)]
    job = Job(("-c", program, "--strategy", "multiworker", *options), workers=2, restarts=1)
    state, output = slurm.end(slurm.submit(job, "--partition=one", "--nodes=1"))
    assert state == "COMPLETED", output
    assert "putting it back into the queue" in output
    assert [epoch.epoch for epoch in load_record(folder).epochs] == list(range(1, 7)), output
