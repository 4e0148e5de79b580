"""Horovod's operations, over MPI or Gloo; works with Horovod 0.28.1 as scripts/install_horovod.sh builds it.

Horovod matches tensors by the names of their operations, in any order. Source: horovod/tensorflow/mpi_ops.py.

`meeting_over_gloo` connects the processes if TF_CONFIG or Slurm describes them. It does what `horovodrun` does for the
processes that it starts: environment variables contain the rank of each process, and the chief runs the server through
which the processes find each other, until they have.

The timelines of all ranks are merged into one file, for Chrome or Perfetto:

    t.rank-0.json, t.rank-1.json, ...    written by each rank: one process per tensor
    t.json                               merged by rank 0: one process per rank, one thread per tensor

Each rank's file gets its name when it is complete, at the end of the program. Sources: horovod/common/timeline.cc;
Trace Event Format, the Chromium project.

Synopsis:

    >>> print(timeline_of_rank(Path("logs/t.json"), 1))
    logs/t.rank-1.json
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import ipaddress
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from tfdist import extras, files
from tfdist.errors import ClusterError, UsageError
from tfdist.groups import CollectiveCounter, ExchangeTotals, ProcessGroup, mpi
from tfdist.jobs import ports, process_exit, rendezvous
from tfdist.jobs.heartbeat import Heartbeat, Limits
from tfdist.jobs.world import World

RANK = "HOROVOD_RANK"
CONTROLLER = "HOROVOD_CONTROLLER"
DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
# In the version of a Horovod that scripts/install_horovod.sh has patched.
PATCHED = "+tfdist"
LOOPBACK = "127.0.0.1"
SECONDS_BETWEEN_LOOKS = 0.05  # of the rendezvous server, whether it is to end
# How long rank 0 waits for the timelines that other ranks on its file system have begun.
SECONDS_FOR_OTHERS = 20.0

Event = dict[str, Any]
_set_here: set[str] = set()  # the environment variables that `set_unless_set` has set


def set_by_others() -> set[str]:
    """The names of the environment variables that this process has received."""
    return os.environ.keys() - _set_here


def load() -> Any:
    """The module `horovod.tensorflow`.

    Raises:
        UsageError: Horovod is not installed, or was built for another TensorFlow.
    """
    mpi.yield_when_idle()
    try:
        return importlib.import_module("horovod.tensorflow")
    except ModuleNotFoundError as error:
        raise UsageError("Horovod is not installed", f"run `{extras.horovod_command()}`") from error
    except Exception as error:  # loading its library raises errors of many types
        raise UsageError(
            f"Horovod's library cannot be loaded with TensorFlow {importlib.metadata.version('tensorflow')}: "
            f"{str(error).partition(chr(10))[0]}",
            f"it was built for another TensorFlow or MPI; run `{extras.horovod_command()}`",
        ) from error


class HorovodGroup(ProcessGroup):
    """Connects the processes that Horovod's environment variables describe.

    Raises:
        UsageError: as `load`.
        ClusterError: Horovod cannot start.
    """

    def __init__(self) -> None:
        self._hvd = load()
        try:
            self._hvd.init()
        except Exception as error:
            raise ClusterError(
                f"Horovod cannot start: {str(error).partition(chr(10))[0]}",
                "the log has the reason; see that all processes run, that their hosts reach all ports of each other, "
                "and that HOROVOD_GLOO_IFACE, if set, names the network interface between them",
            ) from error
        self.rank, self.size = self._hvd.rank(), self._hvd.size()
        self.engine = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        # Without NCCL its operations have no kernel for GPUs, and tensors are copied to the host and back.
        self._device = contextlib.nullcontext if self._hvd.nccl_built() else functools.partial(tf.device, "CPU:0")
        self._counter = CollectiveCounter()

    def close(self) -> None:
        self._hvd.shutdown()

    def counts(self) -> tuple[int, int]:
        return self._counter.counts()

    def exchanged(self) -> ExchangeTotals:
        return self._counter.exchanged()

    def _sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._run(self._hvd.allreduce, tensor, name, op=self._hvd.Sum)

    def _reduce_scatter(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        part = self._run(self._hvd.reducescatter, tensor, name, op=self._hvd.Sum)
        return tf.ensure_shape(part, [tensor.shape[0] // self.size, *tensor.shape[1:]])

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self._run(self._hvd.allgather, tensor, name)

    def _broadcast(self, tensor: tf.Tensor, name: str, root: int) -> tf.Tensor:
        return self._run(self._hvd.broadcast, tensor, name, root_rank=root)

    def _run(self, operation: Callable[..., Any], tensor: tf.Tensor, name: str, **options: Any) -> tf.Tensor:
        # Horovod caches what it knows of a name. A reduce-scatter with the name of another operation in another graph
        # ended the process without a message (Horovod 0.28.1, over Gloo).
        unique = f"tfdist.{name}.{operation.__name__}"
        with self._device():
            return self._counter.around(
                lambda: operation(tensor, name=unique, ignore_name_scope=True, **options), [tensor]
            )


@contextlib.contextmanager
def meeting_over_gloo(
    world: World, job_settings: Mapping[str, str], timeout_seconds: float, start_timeout_seconds: float
) -> Iterator[dict[str, str]]:
    """Waits for all processes of `world`, and yields the environment variables with which Horovod connects them.

    Within the context, Horovod starts. Its rendezvous server is open until it has started in all processes, and a
    process that is lost meanwhile ends the others, which would wait in Horovod without a limit.

    Args:
        world: the job with the addresses of its processes, or a single process.
        job_settings: settings that must be the same in all processes.
        timeout_seconds: how long a process may be silent while Horovod starts.
        start_timeout_seconds: how long to wait for the processes.

    Raises:
        ClusterError: as `tfdist.jobs.rendezvous.joined`, or a process was lost.
        UsageError: the processes could not reach each other over Gloo.
    """
    with rendezvous.joined(world, job_settings, start_timeout_seconds) as exchange:
        if exchange is None:
            raise rendezvous.begun_without(world)
        if world.world_size == 1:
            yield gloo_variables(world)
            return
        with _serving(world) if world.is_chief else contextlib.nullcontext():
            problems = [message.decode() for message in exchange(_why_unreachable(world).encode()) if message]
            if problems:
                raise _unreachable(problems)
            # To the others, this process waits in an exchange until Horovod has started.
            limits = Limits(timeout_seconds)
            heartbeat = Heartbeat(world, exchange, lambda: (1, 0), limits, process_exit.end_process)
            with contextlib.closing(heartbeat), heartbeat.work():
                yield gloo_variables(world)
                exchange(b"")


def require_reachable(world: World) -> None:
    """Requires that other hosts can reach this process over Gloo, if `horovodrun` has started it for Gloo.

    Raises:
        UsageError: they cannot.
    """
    problem = _why_unreachable(world) if os.environ.get(CONTROLLER) == "gloo" else ""
    if problem:
        raise _unreachable([problem])


def _unreachable(problems: Sequence[str]) -> UsageError:
    return UsageError(
        "Horovod was built without tfdist's patch, and would listen where other hosts cannot reach it: "
        f"{'; '.join(problems)}",
        f"run `{extras.horovod_command()}`; or let the own name of each host resolve to its address in the network, "
        "see /etc/hosts",
    )


def _why_unreachable(world: World) -> str:
    """Why other hosts could not reach this process over Gloo; empty if they can.

    Horovod 0.28.1 itself opens some connections at the address of this host's own name, whatever HOROVOD_GLOO_IFACE is.
    """
    if _is_local(world) or PATCHED in importlib.metadata.version("horovod"):
        return ""
    name = socket.gethostname()
    addresses = _addresses(name)
    if addresses and not ipaddress.ip_address(addresses[0]).is_loopback:
        return ""
    end = f"which is `{addresses[0]}` there" if addresses else "which cannot be resolved there"
    return f"the host of {world.named(world.rank)} calls itself `{name}`, {end}"


def set_unless_set(settings: Mapping[str, str]) -> None:
    """Sets the environment variables of `settings` that the user has not set; those of an earlier start anew.

    Raises:
        UsageError: this machine does not have the network interface that is set.
    """
    chosen = {name: value for name, value in settings.items() if name in _set_here or name not in os.environ}
    os.environ.update(chosen)
    _set_here.update(chosen)
    interface, existing = os.environ.get("HOROVOD_GLOO_IFACE"), psutil.net_if_addrs()
    if interface and interface not in existing:  # Gloo would end the process
        names = ", ".join(f"`{name}`" for name in sorted(existing))
        raise UsageError(
            f"`HOROVOD_GLOO_IFACE` is `{interface}`, and this machine has the network interfaces {names}",
            "name one of these, or unset it",
        )


def gloo_variables(world: World) -> dict[str, str]:
    """The environment variables with which `horovodrun` describes the job to a process, for Gloo."""
    hosts = [task.host for task in world.tasks] or ["localhost"]
    host = hosts[world.rank]
    # The machines that have a process with this local rank.
    across = [name for name, count in Counter(hosts).items() if count > world.local_rank]
    values = {
        CONTROLLER: "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": host,
        RANK: str(world.rank),
        "HOROVOD_SIZE": str(world.world_size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_world_size),
        "HOROVOD_CROSS_RANK": str(across.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_GLOO_IFACE": _interface(world),
    }
    if world.world_size > 1:
        chief = world.tasks[0]
        address = LOOPBACK if _is_local(world) else socket.gethostbyname(chief.host)
        values |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(chief.port)}
    return values


def _is_local(world: World) -> bool:
    return world.local_world_size == world.world_size


def _interface(world: World) -> str:
    """The network interface through which the processes of the job reach this one; empty if there is none.

    It is that of the host's address in the job. On its own host, a name may stand for a loopback address: then it is
    the interface through which this host reaches another one.
    """
    if _is_local(world):
        return "lo"
    host = world.tasks[world.rank].host
    other = next(task for task in world.tasks if task.host != host)
    interfaces = psutil.net_if_addrs()
    for address in [*_addresses(host), *_address_towards(other.host, other.port)]:
        for name, entries in interfaces.items():
            if not ipaddress.ip_address(address).is_loopback and address in [entry.address for entry in entries]:
                return name
    return ""


def _addresses(host: str) -> list[str]:
    """The addresses of a host in the order in which they are used; none if its name cannot be resolved."""
    with contextlib.suppress(OSError):
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []


def _address_towards(host: str, port: int) -> list[str]:
    """The address of this host in packets to another one; none is sent."""
    with contextlib.suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as unconnected:
            unconnected.connect(target)
            return [str(unconnected.getsockname()[0])]
    return []


@contextlib.contextmanager
def _serving(world: World) -> Iterator[None]:
    """Runs Horovod's rendezvous server within the context, on the chief's port of the job.

    It is for all interfaces only if processes are on other hosts. If process sets may be added later, which requires
    the server, it stays open.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        allow_reuse_port = ports.shared()
        daemon_threads = True  # a silent client must not delay `server_close`
        block_on_close = False

    server = Server((LOOPBACK if _is_local(world) else "", world.tasks[0].port), RendezvousHandler, False)
    threading.Thread(target=server.serve_forever, args=(SECONDS_BETWEEN_LOOKS,), daemon=True).start()
    try:
        yield
    finally:
        if os.environ.get(DYNAMIC, "0") in ("", "0"):
            server.shutdown()
            server.server_close()


def timeline_of_rank(path: Path, rank: int) -> Path:
    """The path of a rank's complete timeline."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def begin_timeline(path: Path, rank: int) -> Path:
    """Creates the file into which Horovod is to write the timeline of this rank, and returns its path.

    Raises:
        UsageError: the file cannot be written.
    """
    complete = timeline_of_rank(path, rank)
    try:
        complete.parent.mkdir(parents=True, exist_ok=True)
        complete.unlink(missing_ok=True)  # left by an earlier run
        _unfinished(complete).touch()
    except OSError as error:
        raise UsageError(
            f"The timeline cannot be written to `{path}`: {error.strerror}", "choose another file for the timeline"
        ) from error
    return _unfinished(complete)


def end_timeline(path: Path, rank: int, world_size: int) -> None:
    """Completes a rank's file once Horovod has closed it; rank 0 also merges the files that are on its file system."""
    complete = timeline_of_rank(path, rank)
    unfinished = _unfinished(complete)
    if unfinished.stat().st_size:
        unfinished.replace(complete)
    else:
        unfinished.unlink()
    if rank != 0:
        return
    paths = [timeline_of_rank(path, other) for other in range(world_size)]
    until = time.monotonic() + SECONDS_FOR_OTHERS
    while any(_unfinished(other).exists() for other in paths) and time.monotonic() < until:
        time.sleep(0.05)
    traces = {other: json.loads(file.read_text()) for other, file in enumerate(paths) if file.exists()}
    files.write_text(path, json.dumps(list(_joined_timelines(traces)), separators=(",", ":")))


def _joined_timelines(traces: Mapping[int, list[Event]]) -> Iterator[Event]:
    """The events of all ranks, in microseconds since the first rank's start; assumes synchronized clocks."""
    starts = {rank: trace[0]["args"]["start_time_since_epoch_in_micros"] for rank, trace in traces.items()}
    for rank, trace in traces.items():
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for event in trace:
            row = {"pid": rank, "tid": event.get("pid", 0)}
            if event["ph"] != "M":
                yield event | row | {"ts": event["ts"] + starts[rank] - min(starts.values())}
            elif event["name"] == "process_name" and "name" in event["args"]:
                yield event | row | {"name": "thread_name"}


def _unfinished(file: Path) -> Path:
    return file.with_name(f"{file.name}.part")
