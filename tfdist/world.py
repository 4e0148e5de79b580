"""Who am I among whom: read once, frozen, with its source.

Pure parsing: this module never imports TensorFlow. A process that was started alone is a world of one.

Synopsis:

    >>> World.detect({})
    World(rank=0, world_size=1, local_rank=0, local_world_size=1, source='alone')
    >>> World.detect({}).is_chief
    True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """The place of this process in its job.

    Attributes:
        rank: this process' number, 0 to `world_size - 1`.
        world_size: the number of processes that train together.
        local_rank: this process' number on its machine.
        local_world_size: the number of those processes on this machine.
        source: where the numbers were read.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "alone"

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> World:
        """The world that `environment` describes; nothing describes more than one process yet."""
        del environment
        return cls()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.rank == 0


if __name__ == "__main__":
    import os

    print(World.detect(os.environ))
