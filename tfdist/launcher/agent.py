"""The agent of one host: starts its processes of a job, and supervises them: `python -m tfdist.launcher.agent PORT...`.

The launcher starts one on each host, over ssh where that is not this machine; `protocol` has what they say to each
other. PORT is a port to reserve for a process, or 0 for any. All runs in one thread, since a process with threads must
not fork as `subprocess` does here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from tfdist.errors import UsageError
from tfdist.jobs import cluster_file, job_environment, ports
from tfdist.launcher import descriptors, protocol, shares

SECONDS_TO_END = 4.0
# For what a process wrote at its end, or whom it left its streams to.
SECONDS_FOR_OUTPUT = 1.0
SECONDS_BETWEEN_LOOKS = 0.02
CANNOT_START = 126  # as a shell has it
# Where the output of a process goes: a terminal, so that a progress bar moves; two streams; or one.
TERMINAL, APART, TOGETHER = "terminal", "apart", "together"
# A port and at most two streams; two more while it is started.
DESCRIPTORS_OF_A_PROCESS = 3
MOST_WAITING_BYTES = 1 << 20
PART_BYTES = 1 << 16
_INPUT, _OUTPUT = 0, 1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(eq=False)
class Child:
    """One process of the host."""

    number: int
    process: subprocess.Popen[bytes]
    streams: set[int] = field(default_factory=set)  # descriptors from which there may be more to read
    code: int | None = None
    reported: bool = False


class Outgoing:
    """What waits to be sent to the launcher.

    Attributes:
        is_closed: nobody reads any more.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = bytearray()
        self.is_closed = False
        os.set_blocking(_OUTPUT, False)

    @property
    def is_full(self) -> bool:
        """Whether the processes shall wait with further output."""
        return len(self._waiting) > MOST_WAITING_BYTES

    def put(self, message: bytes) -> None:
        """Sends a message, when there is room."""
        if not self.is_closed:
            self._waiting += message
            self._loop.add_writer(_OUTPUT, self._write)

    async def drain(self) -> None:
        """Waits until all is sent."""
        while self._waiting:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    def _write(self) -> None:
        try:
            del self._waiting[: os.write(_OUTPUT, self._waiting[:PART_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.is_closed = True
            self._waiting.clear()
        if not self._waiting:
            self._loop.remove_writer(_OUTPUT)


class Agent:
    """The processes of this host.

    Attributes:
        done: an event: all have ended, and the launcher wants no more of them.
    """

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.outgoing = Outgoing()
        self._loop = asyncio.get_running_loop()
        self._orders = b""
        self._job: dict[str, Any] = {}
        self._to_start: deque[int] = deque()
        self._children: dict[int, Child] = {}  # by number
        self._running: dict[int, Child] = {}  # by PID
        self._streams: dict[int, tuple[IO[bytes], int, Child]] = {}  # by descriptor, with the kind of frame
        self._ending = False
        self._paused = False  # nothing is read from the processes
        self._gpus: list[str] = []
        self._file: IO[str] | None = None
        self._loop.add_reader(_INPUT, self._hear)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        # One signal that is seen is enough for all processes that have ended; further ones may be lost.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)

    def _hear(self) -> None:
        try:
            part = os.read(_INPUT, PART_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._loop.remove_reader(_INPUT)
            self._end()
            return
        *orders, self._orders = (self._orders + part).split(b"\n")
        for order in orders:
            self._obey(json.loads(order))

    def _obey(self, order: dict[str, Any]) -> None:
        if "job" in order:
            self._job = order["job"]
            self._gpus = shares.gpus()
            # The chief of a large job has a connection with each process.
            descriptors.raise_towards(len(self._job["processes"]) * DESCRIPTORS_OF_A_PROCESS + self._job["size"])
        self._to_start.extend(order.get("start", ()))
        self._loop.call_soon(self._start_next)
        if "signal" in order:
            for child in self._running.values():
                if child.number in order.get("of", (child.number,)):
                    _signal(child, order["signal"])

    def _start_next(self) -> None:
        """Starts one process; what else happens is seen before the next one."""
        if self._to_start:
            self._start(self._to_start.popleft())
            self._loop.call_soon(self._start_next)

    def _start(self, number: int) -> None:
        told = self._job["processes"][number]
        cores: set[int] = set()
        if told["share"] is not None:
            cores = set(shares.part_for(sorted(os.sched_getaffinity(0)), *told["share"]))

        def before_exec() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # TensorFlow, oneDNN and tf.data create one thread per core that they may use.
            if cores:
                os.sched_setaffinity(0, cores)

        ours, theirs = pty.openpty() if told["output"] == TERMINAL else (None, subprocess.PIPE)
        try:
            process = subprocess.Popen(
                self._job["argv"],
                cwd=self._job["cwd"],
                env=self._environment(number, told),
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=subprocess.PIPE if told["output"] == APART else subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                preexec_fn=before_exec,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            if ours is not None:
                os.close(ours)
            self._send(protocol.OUT, number, f"error: The process cannot be started: {error.strerror}\n".encode())
            self._send(protocol.EXIT, number, str(CANNOT_START).encode())
            return
        finally:
            if ours is not None:
                os.close(theirs)
        child = self._children[number] = self._running[process.pid] = Child(number, process)
        out = process.stdout if ours is None else os.fdopen(ours, "rb", 0)
        for stream, kind in ((out, protocol.OUT), (process.stderr, protocol.ERR)):
            if stream is not None:
                child.streams.add(stream.fileno())
                self._streams[stream.fileno()] = stream, kind, child
                self._loop.add_reader(stream.fileno(), self._take, stream.fileno())

    def _environment(self, number: int, told: dict[str, Any]) -> dict[str, str]:
        environment = os.environ | self._job["environment"] | {job_environment.PROCESS: f"{os.getpid()}:{number}"}
        if told["share"] is not None and (gpus := shares.part_for(self._gpus, *told["share"])):
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), job_environment.OWN_GPUS: "1"}
        if self._job["cluster"] is None:
            return environment
        for name in (cluster_file.TF_CONFIG, job_environment.CLUSTER, job_environment.TASK):
            environment.pop(name, None)  # of a job to which the launcher belongs
        known = cluster_file.variables(self._job["cluster"], told["role"], told["index"], self._cluster_file)
        return environment | known

    def _cluster_file(self) -> str:
        """The path of a file with all addresses, which nobody else may read, and which ends with this process."""
        if self._file is None:
            self._file = tempfile.NamedTemporaryFile("w", prefix="tfdist-cluster-", suffix=".json")  # noqa: SIM115
            self._file.write(self._job["cluster"])
            self._file.flush()
        return self._file.name

    def _send(self, kind: int, number: int, content: bytes) -> None:
        self.outgoing.put(protocol.frame(kind, number, content))
        if self.outgoing.is_full and not self._paused:
            self._paused = True
            for descriptor in self._streams:
                self._loop.remove_reader(descriptor)
            self._resume()

    def _resume(self) -> None:
        """Reads from the processes again, once there is room for it."""
        if self.outgoing.is_full:
            self._loop.call_later(SECONDS_BETWEEN_LOOKS, self._resume)
            return
        self._paused = False
        for descriptor in self._streams:
            self._loop.add_reader(descriptor, self._take, descriptor)

    def _take(self, descriptor: int) -> None:
        stream, kind, child = self._streams[descriptor]
        try:
            part = os.read(descriptor, PART_BYTES)
        except OSError:  # a terminal whose last user has gone
            part = b""
        if part:
            self._send(kind, child.number, part)
            return
        self._loop.remove_reader(descriptor)
        del self._streams[descriptor]
        child.streams.remove(descriptor)
        stream.close()
        self._report(child)

    def _reap(self) -> None:
        """Takes the exit codes of all that have ended, and ends what they left behind."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._running.pop(found[0], None)
                if child is not None:
                    child.code = child.process.returncode = os.waitstatus_to_exitcode(found[1])
                    ended.append(child)
        self._kill_orphans()
        for child in ended:
            self._report(child)
            self._loop.call_later(SECONDS_FOR_OUTPUT, self._report_at_last, child)

    def _kill_orphans(self) -> None:
        """Ends the descendants of ended processes: this process has become their parent."""
        running = {f"{os.getpid()}:{child.number}" for child in self._running.values()}
        for process in psutil.Process().children():
            if process.pid not in self._running:
                with contextlib.suppress(psutil.Error):
                    mark = process.environ().get(job_environment.PROCESS)
                    if mark is not None and mark not in running:
                        process.kill()

    def _report(self, child: Child) -> None:
        """Sends the exit code of an ended process, after all that it has written."""
        if child.code is None or child.streams or child.reported:
            return
        child.reported = True
        code = child.code if child.code >= 0 else 128 - child.code
        self._send(protocol.EXIT, child.number, str(code).encode())
        self._end_if_all_have()

    def _report_at_last(self, child: Child) -> None:
        """Does so although somebody else has its streams still."""
        if self._paused:
            self._loop.call_later(SECONDS_FOR_OUTPUT, self._report_at_last, child)
            return
        for descriptor in list(child.streams):
            self._loop.remove_reader(descriptor)
            self._streams.pop(descriptor)[0].close()
        child.streams.clear()
        self._report(child)

    def close(self) -> None:
        """Removes the file with the addresses, if there is one."""
        if self._file is not None:
            self._file.close()

    def _end(self) -> None:
        self._ending = True
        self._to_start.clear()
        for child in self._running.values():
            _signal(child, signal.SIGTERM)
        self._loop.call_later(SECONDS_TO_END, _kill_children)
        self._loop.call_later(SECONDS_TO_END + SECONDS_FOR_OUTPUT, self.done.set)
        self._end_if_all_have()

    def _end_if_all_have(self) -> None:
        if self._ending and all(child.reported for child in self._children.values()):
            self.done.set()


async def serve() -> None:
    """Starts and supervises processes as the launcher says, until it closes the connection."""
    agent = Agent()
    await agent.done.wait()
    _kill_children()
    agent.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS_FOR_OUTPUT):
            await agent.outgoing.drain()


def main(*wanted: str) -> int:
    """Reserves the ports, and supervises a process for each of them."""
    try:
        descriptors.require(DESCRIPTORS_OF_A_PROCESS * len(wanted), f"The agent of {len(wanted)} processes on a host")
    except UsageError as error:
        print(json.dumps({"refused": [error.sentence, error.hint]}), flush=True)
        return error.exit_code
    # Orphaned descendants of the processes become children of the agent, and are ended with them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.ExitStack() as until_the_end:
        held = [until_the_end.enter_context(ports.hold(int(port))) for port in wanted]
        print(json.dumps({"ports": [each.getsockname()[1] for each in held]}), flush=True)
        asyncio.run(serve())
    return 0


def _signal(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
