"""The agent of a host: starts and supervises the host's processes: `python -m tfdist.launcher.agent PORT...`.

The launcher starts one agent on each host, over ssh on other machines. PORT is the port to reserve for a process, or 0
for any free port. Everything runs in one thread, because a process with threads must not fork with a `preexec_fn`.

The launcher and the agent exchange messages over the agent's standard input and output:

    agent     →  {"ports": [34567, ...]}            the port that it has reserved for each process of its host
    launcher  →  {"job": {...}, "start": [0, 1]}    the job, once all addresses are known, and which processes to start
    agent     →  frames                             output and exit codes, each with the number of a process of the host
    launcher  →  {"signal": 15}                     a signal for all processes, or for those listed in `processes`
    launcher  →  end of input                       end all processes: SIGTERM, then SIGKILL

The launcher's messages and the agent's first message are lines of JSON. Instead of ports, the agent's first message may
be {"refused": [sentence, hint]}. The input also ends when the launcher dies or the connection breaks, so no process is
left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Any

import psutil

from tfdist.errors import UsageError
from tfdist.jobs import job_environment, ports
from tfdist.launcher import lifetime, resources

SECONDS_TO_END = 4.0
# How long to read from a process that has ended: a descendant may keep its streams open.
SECONDS_FOR_OUTPUT = 1.0
SECONDS_BETWEEN_POLLS = 0.02
CANNOT_START = 126  # the exit code of a shell in this case
# Where a process writes: to a terminal, so that a progress bar moves; to two streams; or to a single stream.
TERMINAL, SEPARATE, MERGED = "terminal", "separate", "merged"
# A port and at most two streams.
FILES_PER_PROCESS = 3
MAX_BUFFERED_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
# The kinds of frames. EXIT carries the exit code as text, and is the last frame about a process.
OUT, ERR, EXIT = range(3)
_HEADER = struct.Struct("!BII")  # kind, number of the process, bytes of content
_INPUT, _OUTPUT = 0, 1


def frame(kind: int, number: int, content: bytes) -> bytes:
    """Encodes a message from the agent about process `number` of its host."""
    return _HEADER.pack(kind, number, len(content)) + content


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes] | None:
    """Returns kind, process number and content of the next frame; `None` at the end of the connection."""
    try:
        kind, number, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        return kind, number, await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def first_message(line: bytes) -> dict[str, Any] | None:
    """Decodes the agent's first message; `None` for any other line, such as the host's login message."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and {"ports", "refused"} & message.keys() else None


@dataclass(eq=False)
class Child:
    """One process of the host."""

    number: int
    process: subprocess.Popen[bytes]
    streams: set[int] = field(default_factory=set)  # descriptors that have not reached their end
    code: int | None = None
    reported: bool = False


class Outgoing:
    """The buffer of messages to the launcher.

    Attributes:
        is_closed: the launcher no longer reads.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self.is_closed = False
        os.set_blocking(_OUTPUT, False)

    @property
    def is_full(self) -> bool:
        """Whether the agent should stop reading from the processes."""
        return len(self._buffer) > MAX_BUFFERED_BYTES

    def put(self, message: bytes) -> None:
        """Queues a message."""
        if not self.is_closed:
            self._buffer += message
            self._loop.add_writer(_OUTPUT, self._write)

    async def drain(self) -> None:
        """Waits until all messages are sent."""
        while self._buffer:
            await asyncio.sleep(SECONDS_BETWEEN_POLLS)

    def _write(self) -> None:
        try:
            del self._buffer[: os.write(_OUTPUT, self._buffer[:CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self.is_closed = True
            self._buffer.clear()
        if not self._buffer:
            self._loop.remove_writer(_OUTPUT)


class Agent:
    """The processes of this host.

    Attributes:
        done: set when all processes have ended and the launcher has closed the connection.
    """

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.outgoing = Outgoing()
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._job: dict[str, Any] = {}
        self._to_start: deque[int] = deque()
        self._children: dict[int, Child] = {}  # by number
        self._running: dict[int, Child] = {}  # by PID
        self._streams: dict[int, tuple[IO[bytes], int, Child]] = {}  # by descriptor, with the kind of frame
        self._ending = False
        self._paused = False  # nothing is read from the processes
        self._gpus: list[str] = []
        self._file: IO[str] | None = None
        self._loop.add_reader(_INPUT, self._read_orders)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        # One handled SIGCHLD reaps all processes that have ended, so further wake-ups may be lost.
        signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)

    def _read_orders(self) -> None:
        try:
            chunk = os.read(_INPUT, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._loop.remove_reader(_INPUT)
            self._end()
            return
        *orders, self._received = (self._received + chunk).split(b"\n")
        for order in orders:
            self._execute(json.loads(order))

    def _execute(self, order: dict[str, Any]) -> None:
        if "job" in order:
            self._job = order["job"]
            self._gpus = resources.gpus()
            # The chief of a large job has a connection to each process.
            resources.raise_file_limit(len(self._job["processes"]) * FILES_PER_PROCESS + self._job["size"])
        self._to_start.extend(order.get("start", ()))
        self._loop.call_soon(self._start_next)
        if "signal" in order:
            for child in self._running.values():
                if child.number in order.get("processes", (child.number,)):
                    _signal(child, order["signal"])

    def _start_next(self) -> None:
        """Starts one process, and lets other events run before the next."""
        if self._to_start:
            self._start(self._to_start.popleft())
            self._loop.call_soon(self._start_next)

    def _start(self, number: int) -> None:
        settings = self._job["processes"][number]
        cores: set[int] = set()
        if settings["cores"] is not None:
            cores = set(resources.share_of(sorted(os.sched_getaffinity(0)), *settings["cores"]))

        def before_exec() -> None:
            lifetime.end_with_parent(signal.SIGKILL)
            # TensorFlow, oneDNN and tf.data create one thread per core of the affinity mask.
            if cores:
                os.sched_setaffinity(0, cores)

        master, slave = pty.openpty() if settings["output"] == TERMINAL else (None, subprocess.PIPE)
        try:
            process = subprocess.Popen(
                self._job["argv"],
                cwd=self._job["cwd"],
                env=self._environment(number, settings),
                stdin=subprocess.DEVNULL,
                stdout=slave,
                stderr=subprocess.PIPE if settings["output"] == SEPARATE else subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                preexec_fn=before_exec,  # noqa: PLW1509 - this process has one thread
            )
        except OSError as error:
            if master is not None:
                os.close(master)
            self._send(OUT, number, f"error: The process cannot be started: {error.strerror}\n".encode())
            self._send(EXIT, number, str(CANNOT_START).encode())
            return
        finally:
            if master is not None:
                os.close(slave)
        child = self._children[number] = self._running[process.pid] = Child(number, process)
        out = process.stdout if master is None else os.fdopen(master, "rb", 0)
        for stream, kind in ((out, OUT), (process.stderr, ERR)):
            if stream is not None:
                child.streams.add(stream.fileno())
                self._streams[stream.fileno()] = stream, kind, child
                self._loop.add_reader(stream.fileno(), self._forward, stream.fileno())

    def _environment(self, number: int, settings: dict[str, Any]) -> dict[str, str]:
        environment = os.environ | self._job["environment"] | {job_environment.PROCESS: f"{os.getpid()}:{number}"}
        if settings["gpus"] is not None and (gpus := resources.share_of(self._gpus, *settings["gpus"])):
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), job_environment.OWN_GPUS: "1"}
        if self._job["cluster"] is None:
            return environment
        for name in (job_environment.TF_CONFIG, job_environment.CLUSTER, job_environment.TASK):
            environment.pop(name, None)  # the launcher may itself belong to a job
        cluster = self._job["cluster"]
        return environment | job_environment.variables_of_cluster(
            cluster, settings["role"], settings["index"], self._cluster_file
        )

    def _cluster_file(self) -> str:
        """Returns the path of a temporary file with all addresses, readable by the user only."""
        if self._file is None:
            self._file = tempfile.NamedTemporaryFile("w", prefix="tfdist-cluster-", suffix=".json")  # noqa: SIM115
            self._file.write(self._job["cluster"])
            self._file.flush()
        return self._file.name

    def _send(self, kind: int, number: int, content: bytes) -> None:
        self.outgoing.put(frame(kind, number, content))
        if self.outgoing.is_full and not self._paused:
            self._paused = True
            for descriptor in self._streams:
                self._loop.remove_reader(descriptor)
            self._resume()

    def _resume(self) -> None:
        """Reads from the processes again once the buffer has space."""
        if self.outgoing.is_full:
            self._loop.call_later(SECONDS_BETWEEN_POLLS, self._resume)
            return
        self._paused = False
        for descriptor in self._streams:
            self._loop.add_reader(descriptor, self._forward, descriptor)

    def _forward(self, descriptor: int) -> None:
        """Sends what a process has written, or closes its stream at the end."""
        stream, kind, child = self._streams[descriptor]
        try:
            chunk = os.read(descriptor, CHUNK_BYTES)
        except OSError:  # a terminal that no process has open any longer
            chunk = b""
        if chunk:
            self._send(kind, child.number, chunk)
            return
        self._loop.remove_reader(descriptor)
        del self._streams[descriptor]
        child.streams.remove(descriptor)
        stream.close()
        self._report(child)

    def _reap(self) -> None:
        """Collects the exit codes of all processes that have ended, and kills their descendants."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (result := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = result
                child = self._running.pop(pid, None)
                if child is not None:
                    child.code = child.process.returncode = os.waitstatus_to_exitcode(status)
                    ended.append(child)
        self._kill_orphans()
        for child in ended:
            self._report(child)
            self._loop.call_later(SECONDS_FOR_OUTPUT, self._close_and_report, child)

    def _kill_orphans(self) -> None:
        """Kills the descendants of ended processes, whose parent this process has become."""
        running = {f"{os.getpid()}:{child.number}" for child in self._running.values()}
        for process in psutil.Process().children():
            if process.pid not in self._running:
                with contextlib.suppress(psutil.Error):
                    mark = process.environ().get(job_environment.PROCESS)
                    if mark is not None and mark not in running:
                        process.kill()

    def _report(self, child: Child) -> None:
        """Sends the exit code of a process once it has ended and all its output has been sent."""
        if child.code is None or child.streams or child.reported:
            return
        child.reported = True
        code = child.code if child.code >= 0 else 128 - child.code
        self._send(EXIT, child.number, str(code).encode())
        self._finish_if_ended()

    def _close_and_report(self, child: Child) -> None:
        """Reports an ended process even though another process still has its streams open."""
        if self._paused:
            self._loop.call_later(SECONDS_FOR_OUTPUT, self._close_and_report, child)
            return
        for descriptor in list(child.streams):
            self._loop.remove_reader(descriptor)
            self._streams.pop(descriptor)[0].close()
        child.streams.clear()
        self._report(child)

    def close(self) -> None:
        """Removes the file with the addresses, if it was needed."""
        if self._file is not None:
            self._file.close()

    def _end(self) -> None:
        self._ending = True
        self._to_start.clear()
        for child in self._running.values():
            _signal(child, signal.SIGTERM)
            _signal(child, signal.SIGCONT)  # a stopped process handles signals only when it continues
        self._loop.call_later(SECONDS_TO_END, _kill_children)
        self._loop.call_later(SECONDS_TO_END + SECONDS_FOR_OUTPUT, self.done.set)
        self._finish_if_ended()

    def _finish_if_ended(self) -> None:
        if self._ending and all(child.reported for child in self._children.values()):
            self.done.set()


async def serve() -> None:
    """Starts and supervises processes as the launcher orders, until it closes the connection."""
    agent = Agent()
    await agent.done.wait()
    _kill_children()
    agent.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SECONDS_FOR_OUTPUT):
            await agent.outgoing.drain()


def main(*requested_ports: str) -> int:
    """Reserves the ports, and supervises a process for each port."""
    count = len(requested_ports)
    try:
        resources.require_files(FILES_PER_PROCESS * count, f"The agent of {count} processes on a host")
    except UsageError as error:
        print(json.dumps({"refused": [error.sentence, error.hint]}), flush=True)
        return error.exit_code
    # Orphaned descendants of the processes become children of the agent, which kills them.
    lifetime.adopt_descendants()
    with contextlib.ExitStack() as reservations:
        sockets = [reservations.enter_context(ports.hold(int(port))) for port in requested_ports]
        print(json.dumps({"ports": [reserved.getsockname()[1] for reserved in sockets]}), flush=True)
        asyncio.run(serve())
    return 0


def _signal(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
