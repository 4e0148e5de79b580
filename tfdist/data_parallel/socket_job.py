"""What strategies share whose processes connect by sockets of tfdist, and need no servers of TensorFlow."""

from __future__ import annotations

import functools

from tfdist.data_parallel import collective, distribute
from tfdist.errors import UsageError
from tfdist.groups import Alone, Communicator
from tfdist.groups.socket_group import SocketCommunicator
from tfdist.groups.sockets import star
from tfdist.jobs import rendezvous
from tfdist.jobs.world import World

SECONDS_TO_CONNECT = 10.0


class SocketStrategy(collective.MultiProcessStrategy):
    """A strategy of several processes that are connected by sockets."""

    communicator: SocketCommunicator

    def connect(self) -> Communicator:
        if self.world.world_size == 1:
            return Alone()
        return join(self.world, self.name, self.timeout_seconds, self._start_timeout_seconds)


def join(world: World, name: str, timeout_seconds: float, start_timeout_seconds: float) -> SocketCommunicator:
    """Joins the job of the strategy `name` by sockets that live as long as this process, which can do so once.

    Raises:
        UsageError: the addresses of the processes are not known, or some are parameter servers.
        ClusterError: a process is missing, or has other settings.
    """
    if world.tasks_of("ps"):
        raise UsageError(
            f"`TF_CONFIG` has parameter servers, and `{name}` has no use for them",
            "use the strategy `parameter_server`, or a cluster of workers alone",
        )
    distribute.require_addresses(world, name)
    return _connected(world, name, timeout_seconds, start_timeout_seconds)


@functools.cache
def _connected(world: World, name: str, timeout_seconds: float, start_timeout_seconds: float) -> SocketCommunicator:
    """Sockets that live as long as this process, which can join a job once."""
    rendezvous.meet(world, {"strategy": name}, start_timeout_seconds)
    with star.joined(world, start_timeout_seconds) as exchange:
        return SocketCommunicator(world, exchange, min(timeout_seconds, SECONDS_TO_CONNECT), timeout_seconds)
