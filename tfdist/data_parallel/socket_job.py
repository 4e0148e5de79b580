"""What strategies share whose processes connect by sockets of tfdist, and need no servers of TensorFlow."""

from __future__ import annotations

from tfdist.groups import Alone, ProcessGroup, joining
from tfdist.groups.socket_group import SocketGroup
from tfdist.training import job_strategy as collective


class SocketStrategy(collective.MultiProcessStrategy):
    """A strategy of several processes that are connected by sockets."""

    group: SocketGroup

    def connect(self) -> ProcessGroup:
        if self.world.world_size == 1:
            return Alone()
        return joining.join_sockets(self.world, self.name, self.timeout_seconds, self._start_timeout_seconds)
