"""`horovod`: Horovod's operations add the gradients; a copy of every variable in each process of a job.

    horovodrun, mpirun                      have set the places of the processes; Horovod finds the others itself
    TF_CONFIG, Slurm, `--workers N`         tfdist brings the processes together, over Gloo

Source: Sergeev and Del Balso, Horovod: fast and easy distributed deep learning in TensorFlow, arXiv:1802.05799, 2018.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from tfdist import ports, reduction, rendezvous
from tfdist import timeline as timelines
from tfdist.communicators import Communicator
from tfdist.communicators import horovod as engine
from tfdist.errors import UnknownNameError, UsageError
from tfdist.strategies import collective
from tfdist.world import World, means_itself

# Horovod looks for new tensors so often, in milliseconds. Its default, 1, is a part of a small step.
CYCLE_TIME_MS = "0.1"
WIRE_DTYPES = {"none": None, "bf16": tf.bfloat16, "fp16": tf.float16}


class HorovodStrategy(collective.CommunicatingStrategy):
    """Trains on all processes of a job, over MPI or over Gloo.

    Args:
        compression: "none"; "bf16" or "fp16": gradients travel in that type, half the bytes.
        buffer_bytes: gradients below this size travel together, in buffers of this size.
        dense_below_bytes: gradients of tables below this size are sent whole, where only some rows have one; not
            for adaptive optimizers, see `tfdist.communicators.Communicator`.
        timeline: a file for Horovod's timeline of this job, see `tfdist.timeline`.
        options: see `tfdist.strategies.collective.CommunicatingStrategy`.
    """

    name = "horovod"

    def __init__(
        self,
        *,
        compression: str = "none",
        buffer_bytes: int = 1 << 20,
        dense_below_bytes: int = 0,
        timeline: str | os.PathLike[str] | None = None,
        **options: Any,
    ):
        if compression not in WIRE_DTYPES:
            raise UnknownNameError("compression", compression, WIRE_DTYPES)
        self.compression = compression
        self.packing = reduction.Packing(buffer_bytes, WIRE_DTYPES[compression])
        self._dense_below_bytes = dense_below_bytes
        self._timeline = timeline
        super().__init__(**options)

    def connect(self) -> Communicator:
        timeline = None if self._timeline is None else Path(self._timeline).absolute()
        communicator = _join(self.world, self.timeout_seconds, self._start_timeout_seconds, timeline)
        communicator.dense_below_bytes = self._dense_below_bytes
        return communicator

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "compression": self.compression,
            "buffer_bytes": self.packing.buffer_bytes,
            "dense_below_bytes": self._dense_below_bytes,
        }


@functools.cache
def _join(world: World, timeout_seconds: float, start_timeout_seconds: float, timeline: Path | None) -> Communicator:
    """Joins the job, which a process can do once."""
    engine.load()
    settings = _settings(timeout_seconds)
    if world.world_size == 1:
        settings |= _places(world)
    elif world.tasks:
        rendezvous.meet(world, {"strategy": HorovodStrategy.name}, start_timeout_seconds)
        settings |= _places(world)
        if world.is_chief:
            _serve_places(world.tasks[0].port)
    # What the user has set holds.
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    _check_interface(os.environ.get("HOROVOD_GLOO_IFACE"))
    if timeline is not None:
        # The second is known to a Horovod that scripts/install_horovod.sh has built; others write that of rank 0.
        os.environ["HOROVOD_TIMELINE"] = str(timelines.begin(timeline, world.rank))
        os.environ["HOROVOD_TIMELINE_EVERY_RANK"] = "1"
    communicator = engine.HorovodCommunicator()
    if timeline is not None:
        atexit.register(_end_timeline, communicator, timeline)
    return communicator


def _end_timeline(communicator: Communicator, timeline: Path) -> None:
    communicator.close()  # which closes the file
    timelines.end(timeline, communicator.rank, communicator.size)


def _check_interface(name: str | None) -> None:
    # Gloo would end the process.
    if name and name not in psutil.net_if_addrs():
        there = ", ".join(f"`{found}`" for found in sorted(psutil.net_if_addrs()))
        raise UsageError(
            f"`HOROVOD_GLOO_IFACE` is `{name}`, and this machine has the network interfaces {there}",
            "name one of these, or unset it",
        )


def _settings(timeout_seconds: float) -> dict[str, str]:
    seconds = max(1, round(timeout_seconds))
    return {
        "HOROVOD_CYCLE_TIME": CYCLE_TIME_MS,
        # Gradients come packed; Horovod's own packing would copy them once more.
        "HOROVOD_FUSION_THRESHOLD": "0",
        # It takes one that is busy for one that is gone; `tfdist.heartbeat` tells them apart.
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(seconds),
    }


def _places(world: World) -> dict[str, str]:
    """The variables by which `horovodrun` tells a process its place, for Gloo."""
    hosts = [task.host for task in world.tasks] or ["localhost"]
    host = hosts[world.rank]
    # The processes with this number on their machines.
    across = [name for name, count in Counter(hosts).items() if count > world.local_rank]
    found = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.world_size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_world_size),
        "HOROVOD_CROSS_RANK": str(across.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_GLOO_IFACE": _interface(host),
    }
    if world.world_size > 1:
        chief = world.tasks[0]
        address = socket.gethostbyname(chief.host)
        found |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(chief.port)}
    return found


def _interface(host: str) -> str:
    """The network interface of this machine by which others reach it as `host`."""
    if means_itself(host):
        return "lo"
    addresses = {found[4][0] for found in socket.getaddrinfo(host, None)}
    for name, found in psutil.net_if_addrs().items():
        if any(address.address in addresses for address in found):
            return name
    return ""


def _serve_places(port: int) -> None:
    """Has the chief keep what the processes tell each other while they connect, on its own port of the job."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread

    class Server(RendezvousHTTPServer):
        allow_reuse_port = ports.shared()

    in_thread(target=Server(("", port), RendezvousHandler, False).serve_forever)


STRATEGY = HorovodStrategy
