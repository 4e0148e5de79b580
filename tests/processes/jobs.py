"""Jobs of several real processes, started by the launcher as a user does, and always ended."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 240


class RunningJob:
    """A launcher and its processes; ends all of them when the test does."""

    def __init__(self, *arguments, cwd, module="tfdist.launch", environment=None, cores=None, inside=()):
        self.launcher = subprocess.Popen(
            [*inside, sys.executable, "-m", module, *map(str, arguments)],
            cwd=cwd,
            env=clean_environment() | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,  # noqa: PLW1509
        )
        self._seen = set()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        left = [*self.everyone(), psutil.Process(self.launcher.pid)] if self.launcher.poll() is None else self.left()
        for process in left:
            if process.is_running():
                process.kill()
        self.launcher.wait()

    def everyone(self):
        """All processes below the launcher."""
        found = psutil.Process(self.launcher.pid).children(recursive=True)
        self._seen.update(found)
        return found

    def process(self, role, index):
        """The user's program in one role, as soon as it has started."""

        def find():
            for process in self.everyone():
                try:
                    started = "tfdist.launcher.script" in process.cmdline()
                    if started and place(process.environ()) == (role, index):
                        return process
                except (psutil.Error, KeyError):
                    continue
            return None

        return self.wait_for(find)

    def wait_for(self, condition, seconds=DEADLINE_SECONDS):
        """What `condition` returns as soon as it is true."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = condition()
            if found:
                return found
            assert self.launcher.poll() is None, f"the job has ended: {self.launcher.communicate()}"
            self.everyone()
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds} s")

    def signal(self, number):
        self.everyone()
        self.launcher.send_signal(number)

    def end(self, seconds=DEADLINE_SECONDS):
        """Waits for the launcher, and returns its exit code, output and errors."""
        try:
            out, err = self.launcher.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.launcher.send_signal(signal.SIGABRT)
            raise
        return self.launcher.returncode, out, err

    def left(self):
        """The processes of the job that are still there."""
        return [p for p in self._seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def free_ports(count):
    """Ports of this machine on which nothing listens."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def signalled(job, run_dir, number):
    """Sends a signal to worker 1 after two epochs: the exit code of the job, which soon ends, and what it has said."""
    job.wait_for(lambda: epochs_done(run_dir) >= 2)
    job.process("worker", 1).send_signal(number)
    began = time.monotonic()
    code, out, err = job.end()
    assert time.monotonic() - began < 30
    assert job.left() == []
    return code, out + err


def place(environment):
    """The role and the index of a process of a job, as its environment says."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return "worker", int(environment["OMPI_COMM_WORLD_RANK"])
    task = json.loads(environment["TF_CONFIG"])["task"]
    return task["type"], task["index"]


def require_horovod():
    """Skips the tests of a module where Horovod is not installed."""
    pytest.importorskip("horovod", reason="Horovod is not installed: run `make horovod`")


def require_mpi():
    """Skips the tests of a module where MPI is not installed."""
    if shutil.which("mpirun") is None:
        pytest.skip("there is no `mpirun`: run `make horovod`", allow_module_level=True)


def clean_environment():
    """This environment without the variables of a job."""
    dropped = ("TF_CONFIG", "TFDIST_", "SLURM_", "HOROVOD_", "OMPI_", "PMIX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


def run_script(script, *arguments, cwd, options=()):
    """What the processes of a job of two print."""
    if "horovod" in arguments:
        pytest.importorskip("horovod", reason="Horovod is not installed: run `make horovod`")
    (cwd / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "--verbose", "--workers", "2", *options, "script.py", *arguments],
        cwd=cwd,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def launched(*arguments, cwd, timeout):
    """A job that the launcher has started, once it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "tfdist.launch", *arguments],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


class Several:
    """Scripts that the processes of one job run one after the other: starting it takes longer than most of them.

    Args:
        folder: for the scripts, and what they print.
        scripts: by name, (text, arguments).
        workers: how many processes.
        options: of the launcher.
    """

    def __init__(self, folder, scripts, workers=2, options=()):
        self._folder, self._workers = folder, workers
        for name, (text, _) in scripts.items():
            (folder / f"{name}.py").write_text(text)
        what = json.dumps([[name, arguments] for name, (_, arguments) in scripts.items()])
        program = ("-m", "tests.processes.several", str(folder), what)
        self._done = launched("--workers", str(workers), *options, *program, cwd=folder, timeout=600)

    def printed(self, name):
        """What each process has printed in this script, by rank."""
        errors = [path.read_text() for path in self._folder.glob("*.error")]
        ended = [self._folder / f"{name}.{rank}.txt" for rank in range(self._workers)]
        assert all(path.exists() for path in ended), "\n".join([*errors, self._done.stderr])[-4000:]
        return [path.read_text() for path in ended]


def train(*options, run_dir, strategy="multiworker", **more):
    """`python -m tfdist.train` on the digits in two workers."""
    arguments = ["--strategy", strategy, "--model", "mlp", "--dataset", "digits", "--run-dir", run_dir, *options]
    if "--workers" not in options:
        arguments += ["--workers", "2"]
    return RunningJob(*arguments, module="tfdist.train", cwd=run_dir.parent, **more)


def after_two_epochs(job, run_dir, role, index, number):
    """Sends a signal to one process in the middle of training; the launcher's exit code, output and errors."""
    job.wait_for(lambda: epochs_done(run_dir) >= 2)
    job.process(role, index).send_signal(number)
    return job.end()


def start_by_hand(run_dir, config, *options, strategy="multiworker", inside=(), environment=None):
    """One process of a job, with its TF_CONFIG, as people start it on its own machine."""
    text = config if isinstance(config, str) else json.dumps(config)
    arguments = ["--strategy", strategy, "--model", "mlp", "--dataset", "digits", "--run-dir", run_dir, "--quiet"]
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "tfdist.train", *map(str, arguments), *map(str, options)],
        cwd=ROOT,
        env=clean_environment() | {"TF_CONFIG": text} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class by_hand:  # noqa: N801 - used as a function
    """The processes of a job on this machine, each started with its TF_CONFIG; `own` are the options of each."""

    def __init__(self, run_dir, *options, roles=("worker", "worker"), own=((), (), ()), strategy="multiworker"):
        self.addresses = free_addresses(len(roles))
        self.processes = [
            start_by_hand(run_dir, config, *options, *more, strategy=strategy)
            for config, more in zip(configs(roles, self.addresses), own, strict=False)
        ]

    def __enter__(self):
        return self.processes

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()


def configs(roles, addresses):
    """The TF_CONFIG of each process of a job with these roles, in their order."""
    cluster = {role: [a for r, a in zip(roles, addresses, strict=True) if r == role] for role in roles}
    tasks = [{"type": role, "index": roles[:rank].count(role)} for rank, role in enumerate(roles)]
    return [{"cluster": cluster, "task": task} for task in tasks]


def free_addresses(count):
    """Addresses of this machine on which nobody listens."""
    held = [socket.create_server(("localhost", 0)) for _ in range(count)]
    addresses = [f"localhost:{listener.getsockname()[1]}" for listener in held]
    for listener in held:
        listener.close()
    return addresses


def wait_for_epochs(run_dir, count, processes, seconds=120):
    """Until so many epochs are in the record, while all processes are there."""
    until = time.monotonic() + seconds
    while epochs_done(run_dir) < count:
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes if p.poll()]
        assert time.monotonic() < until
        time.sleep(0.05)


def unframed(text):
    """What is said on the terminal, in one line: a frame around the end of a process's output breaks its lines."""
    return " ".join(line.strip("│ \r") for line in text.splitlines())


def record(run_dir):
    """The run's record."""
    return json.loads((run_dir / "run.json").read_text())


def weights(run_dir):
    """Those of the model that a run left."""
    import keras

    return keras.saving.load_model(run_dir / "model.keras").get_weights()


def epochs_done(run_dir):
    """The epochs in the run's record."""
    try:
        return len(record(run_dir)["epochs"])
    except (OSError, ValueError):
        return 0
