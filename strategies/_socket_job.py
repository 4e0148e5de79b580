"""What strategies share whose processes connect by sockets of tfdist, and need no servers of TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import tensorflow as tf

from tfdist.cluster import rendezvous
from tfdist.cluster.heartbeat import Heartbeat, Limits
from tfdist.cluster.world import World
from tfdist.communicators.sockets import SocketCommunicator
from tfdist.errors import ClusterError, UsageError
from tfdist.strategies import _collective as collective
from tfdist.strategies import _distribute as distribute
from tfdist.transport import star

SECONDS_TO_CONNECT = 10.0


class SocketStrategy(collective.MultiProcessStrategy):
    """A strategy of several processes that are connected by sockets."""

    communicator: SocketCommunicator

    def connect(self) -> SocketCommunicator:
        if self.world.tasks_of("ps"):
            raise UsageError(
                f"`TF_CONFIG` has parameter servers, and `{self.name}` has no use for them",
                "use the strategy `parameter_server`, or a cluster of workers alone",
            )
        distribute.require_addresses(self.world, self.name)
        return _connected(self.world, self.name, self.timeout_seconds, self._start_timeout_seconds)

    def heartbeat(self, limits: Limits) -> Heartbeat:
        return _heartbeat(self.communicator, self.world, limits)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        try:
            with self._heartbeat.work() if self._heartbeat is not None else contextlib.nullcontext():
                yield
        except (tf.errors.OpError, ClusterError) as error:
            failure = self.communicator.sockets.failure
            if failure is None:
                raise
            raise self.explained(failure) from error

    def explained(self, failure: ClusterError) -> ClusterError:
        """The error to raise for a `failure` of the sockets, which names the processes that are gone."""
        return failure


@functools.cache
def _connected(world: World, name: str, timeout_seconds: float, start_timeout_seconds: float) -> SocketCommunicator:
    """Sockets that live as long as this process, which can join a job once."""
    rendezvous.meet(world, {"strategy": name}, start_timeout_seconds)
    with star.joined(world, start_timeout_seconds) as exchange:
        return SocketCommunicator(world, exchange, min(timeout_seconds, SECONDS_TO_CONNECT), timeout_seconds)


@functools.cache
def _heartbeat(communicator: SocketCommunicator, world: World, limits: Limits) -> Heartbeat:
    """The heartbeat of this process, whose threads live as long as the process."""
    give_up = communicator.sockets.give_up
    heartbeat = Heartbeat(world, communicator.exchange, communicator.counts, limits, give_up)
    communicator.sockets.excuse(heartbeat.others_are_busy)
    return heartbeat
