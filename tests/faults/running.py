"""Runs the job of a row with real processes, causes the fault, and looks at what follows."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults import causes
from tests.faults.network import SwitchedHosts
from tests.faults.program import PLAN
from tests.faults.rows import START_SECONDS, Row
from tests.processes.hosts import ADDRESSES
from tests.processes.jobs import (
    ROOT,
    clean_environment,
    configs,
    free_addresses,
    place,
    require_horovod,
    require_mpi,
    unframed,
)
from tfdist.jobs.job_environment import START_SECONDS as START_VARIABLE

PROGRAM = ROOT / "tests" / "faults" / "program.py"
AS_COMMAND = (sys.executable, "-m", "tfdist.launcher.script")  # prints an error as a sentence, and ends with its code
MARK = "TFDIST_TESTS_ROW"  # in the environment of all processes of a row
MOMENT_SECONDS = 120  # from the start of a job to the moment of its fault
SECONDS_TO_VANISH = 3
SECONDS_TOO_LATE = 20  # how long after the deadline is waited, to know how late it is
FIRST_PORT = 2222


@dataclass
class Result:
    """What became of a row.

    Attributes:
        row: the row.
        seconds: from the fault until the last process has ended; `None` if it was not reached.
        exits: the exit code of each process, or of the launcher; `None` for a process that was still there.
        named: the processes that the errors of the others name.
        left: what was there afterwards: processes, shared memory, files, ports.
        problems: what differs from what the row says; empty if the row passes.
        output: of all processes.
        skipped: why the row cannot run here.
    """

    row: Row
    seconds: float | None = None
    exits: dict = field(default_factory=dict)
    named: list = field(default_factory=list)
    left: list = field(default_factory=list)
    problems: list = field(default_factory=list)
    output: dict = field(default_factory=dict)
    skipped: str = ""


def run(row):
    """The result of a row; all that it has started has ended then.

    Raises:
        pytest.skip.Exception: this machine lacks what the row needs.
    """
    with contextlib.closing(Job(row)) as job:
        job.start()
        result = Result(row)
        if not job.wait_for_moment():
            result.problems.append("the moment was not reached")
        else:
            began = time.monotonic()
            causes.CAUSES.get(row.fault, causes.nothing)(job)
            (job.moments / "done").touch()
            result.seconds = job.wait_until_ended(began)
        result.exits = {name: process.poll() for name, process in job.processes.items()}
        result.output = job.output()
        result.named = named_in(row, result)
        result.left = job.left()
        result.problems += differences(row, result)
        if job.strangers and not job.strangers.attempts:
            result.problems.append("no stranger has reached a port")
        return result


class Job:
    """The processes of a row.

    Attributes:
        row: the row.
        processes: those that were started here, by their names: `launcher`, or `worker 0` and so on.
        hosts: the hosts on a switch, or `None`.
        strangers: those that connect to its ports, or `None`.
    """

    def __init__(self, row):
        self.row, self.processes, self.hosts, self.strangers = row, {}, None, None
        self.folder = Path(tempfile.mkdtemp(prefix="tfdist-row-"))
        self.moments, self.temporary = self.folder / "moments", self.folder / "tmp"
        for path in (self.moments, self.temporary, self.folder / "checkpoints"):
            path.mkdir()
        self._mark, self._addresses, self._cleanups = uuid.uuid4().hex, [], []
        self._shared_memory = set(os.listdir("/dev/shm"))

    def start(self):
        if self.row.engine == "horovod":
            require_horovod()
        elif self.row.engine.startswith("mpi"):
            require_mpi()
        if self.row.fault == "full disk":
            causes.mount_small_disk(self)
        if self.row.launched:
            module = [sys.executable, "-m", "tfdist.launch", "--log-dir", self.folder / "logs"]
            self._start("launcher", [*module, "--start-seconds", START_SECONDS, *self.row.arguments, PROGRAM])
            return
        if self.row.crosses_hosts:
            self.hosts = SwitchedHosts(len(self.row.roles))
            self.at_end(self.hosts.close)
            self.hosts.open()
        for position, (name, config) in enumerate(self._configs()):
            inside = self.hosts.inside(position) if self.hosts else ()
            clock = causes.clock_ahead(self) if (self.row.fault, self.row.role) == ("clock", name) else {}
            self._start(name, [*inside, *AS_COMMAND, PROGRAM], clock | {"TF_CONFIG": json.dumps(config)})

    def _configs(self):
        """The name and the TF_CONFIG of each process that is started by hand."""
        roles = self.row.roles
        names = [(role, roles[:position].count(role)) for position, role in enumerate(roles)]
        if self.hosts:
            hosts = list(ADDRESSES[: len(roles)])
            if self.row.fault == "unresolvable":
                hosts[[f"{role} {index}" for role, index in names].index(self.row.role)] = causes.UNRESOLVABLE
            self._addresses = [f"{host}:{FIRST_PORT}" for host in hosts]
        else:
            self._addresses = free_addresses(len(roles))
        for (role, index), config in zip(names, configs(roles, self._addresses), strict=True):
            yield f"{role} {index}", config

    def _start(self, name, command, environment=None):
        row = self.row
        plan = {key: getattr(row, key) for key in ("engine", "role", "fault", "moment", "epochs", "stops", "options")}
        plan |= {"timeout_seconds": row.timeout_seconds, "folder": str(self.folder)}
        variables = {PLAN: json.dumps(plan), MARK: self._mark, "TMPDIR": str(self.temporary)}
        variables |= {START_VARIABLE: str(START_SECONDS), "CUDA_VISIBLE_DEVICES": "-1"}
        with (self.folder / f"{name}.txt").open("wb") as file:
            self.processes[name] = subprocess.Popen(
                list(map(str, command)),
                cwd=self.folder,
                env=clean_environment() | variables | (environment or {}),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def wait_for_moment(self):
        """Whether the moment was reached by the process that meets the fault, or by the chief instead."""
        until = time.monotonic() + MOMENT_SECONDS
        while time.monotonic() < until:
            if self._is_at_moment():
                return True
            if self.row.fault != "unresolvable" and any(p.poll() is not None for p in self.processes.values()):
                return False
            time.sleep(0.01)
        return False

    def _is_at_moment(self):
        if self.row.fault == "unresolvable":
            return True
        if self.row.moment == "meeting":
            return self.hosts.frames >= causes.FRAMES_OF_MEETING
        reached = {path.name.removeprefix(f"{self.row.moment}.") for path in self.moments.glob(f"{self.row.moment}.*")}
        if self.row.moment == "start":
            return self.row.role in reached or (self.row.role == "launcher" and reached)
        return reached and (self.row.role in reached or (self.chief in reached and not self.runs_callbacks))

    @property
    def runs_callbacks(self):
        """Whether the process that meets the fault reaches the moment itself."""
        served = self.row.engine == "parameter_server" and self.row.role != self.chief
        return not (served or self.row.role == "launcher" or self.row.moment == "checkpoint")

    @property
    def chief(self):
        return "chief 0" if self.row.engine == "parameter_server" else "worker 0"

    @property
    def pid(self):
        """The process that meets the fault."""
        if self.row.role in self.processes:
            return self.processes[self.row.role].pid
        return next(process.pid for process in self.everyone() if self._is_hit(process))

    def _is_hit(self, process):
        with contextlib.suppress(psutil.Error, KeyError):
            return "tfdist.launcher.script" in process.cmdline() and self.row.role == "{} {}".format(
                *place(process.environ())
            )
        return False

    def everyone(self):
        """All processes of the row, also those that have lost their parents."""
        there = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    there.append(process)
        return there

    def wait_until_ended(self, began):
        """The seconds from `began` until all have ended that have to, or until it is much too late."""
        until = began + self.row.deadline_seconds + SECONDS_TOO_LATE
        waited = [process for name, process in self.processes.items() if not self.stays(name)]
        while any(process.poll() is None for process in waited) and time.monotonic() < until:
            time.sleep(0.02)
        return time.monotonic() - began

    def stays(self, name):
        """Whether the process is stopped, and nobody is there who could end it."""
        return name == self.row.role and self.row.faulty_exits == (None,)

    def left(self):
        """What is there after the end, for which it has a moment."""
        until = time.monotonic() + SECONDS_TO_VANISH
        while (there := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        return there

    def _left(self):
        staying = {process.pid for name, process in self.processes.items() if self.stays(name)}
        there = [f"process {process.pid}" for process in self.everyone() if process.pid not in staying]
        there += unused({f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - self._shared_memory})
        there += [f"$TMPDIR/{path.name}" for path in self.temporary.iterdir()]
        if not self.hosts and not staying:
            there += [f"port {address}" for address in self._addresses if _answers(address)]
        return there

    def output(self):
        return {name: (self.folder / f"{name}.txt").read_text(errors="replace") for name in self.processes}

    def at_end(self, cleanup):
        self._cleanups.append(cleanup)

    def close(self):
        for process in self.everyone():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        for cleanup in reversed(self._cleanups):
            cleanup()
        shutil.rmtree(self.folder, ignore_errors=True)


def unused(paths):
    """Those of `paths` that no process maps: the others belong to a job beside this one."""
    maps = []
    for pid in psutil.pids() if paths else ():
        with contextlib.suppress(OSError):
            maps.append(Path(f"/proc/{pid}/maps").read_text())
    return sorted(path for path in paths if not any(path in text for text in maps) and Path(path).exists())


def _answers(address):
    host, port = address.split(":")
    with socket.socket() as connection:
        connection.settimeout(1)
        return connection.connect_ex((host, int(port))) == 0


def named_in(row, result):
    """The processes that the errors name; by hand those of the others, where each names another one."""
    texts = [text for name, text in result.output.items() if name != row.role or row.crosses_hosts or row.launched]
    pattern = r"\b(?:worker|chief|ps|rank) \d+"
    return sorted({name for text in texts for line in errors(text) for name in re.findall(pattern, line)})


def errors(text):
    """The sentences of the errors in an output."""
    return re.findall(r"(?:error: |Error: )(.*?)(?:hint:|$)", unframed(text))


def differences(row, result):
    """What differs from what the row says."""
    for name, code in result.exits.items():
        if code not in row.exits_of(name):
            what = "has not ended" if code is None else f"ended with {code}"
            yield f"{name} {what} instead of {_codes(row.exits_of(name))}"
    if result.seconds is not None and result.seconds >= row.deadline_seconds:
        yield f"not within {row.deadline_seconds} s"
    others = [name for name in result.output if (name != row.role or row.launched) and result.exits[name] != 0]
    for name in others:
        if row.named and row.named not in unframed(result.output[name]):
            yield f"{name} does not say `{row.named}`"
        if row.fault != "exception" and "Traceback" in result.output[name]:
            yield f"{name} prints a traceback"
    if row.says and row.says not in unframed("\n".join(result.output.values())):
        yield f"no process says `{row.says}`"
    if result.left:
        yield f"left: {', '.join(result.left)}"


def _codes(codes):
    shown = ["to be still there" if code is None else str(code) for code in codes]
    return " or ".join(shown) if len(shown) < 4 else f"{shown[0]} to {shown[-1]}"
