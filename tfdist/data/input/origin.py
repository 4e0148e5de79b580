"""Where data come from, so that another process can read the same: numbers and names instead of the data.

    Origin        the arguments of `tfdist.data.load`, and what was done to the source afterwards
    FeedOrigin    the arguments of that source's `feed`

A worker of a `parameter_server` job, which runs no program of its own, reads its data by them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tfdist.jobs.world import World


@dataclass(frozen=True)
class Origin:
    """How a source was made.

    Attributes:
        name: of the dataset, as `tfdist.data.load` takes it.
        data_dir: the folder of prepared datasets, if one was given.
        options: of the dataset: pairs of a name and a value that JSON can carry.
        limit: the number of training examples that it was limited to, if it was.
        autoencoding: whether it was turned into one for autoencoding.
        cached: whether its examples are read once, into memory.
    """

    name: str
    data_dir: str | None
    options: tuple[tuple[str, Any], ...]
    limit: int | None = None
    autoencoding: bool = False
    cached: bool = False


@dataclass(frozen=True)
class Asked:
    """What `Source.feed` is asked for, which see."""

    split: str
    global_batch_size: int
    seed: int
    shuffle: bool | None
    augment: str
    stream_positions: bool


@dataclass(frozen=True)
class Part:
    """What `Source.pipeline` is asked for, which see."""

    split: str
    global_batch_size: int
    world: World
    seed: int
    epoch: int
    first_batch: int
    shuffle: bool | None
    augment: str
    deterministic: bool
    by_file: bool


@dataclass(frozen=True)
class FeedOrigin:
    """How a feed was made: by the source that `source` describes, asked for `asked`."""

    source: Origin
    asked: Asked

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> FeedOrigin:
        """What `to_json` wrote."""
        fields = json.loads(line)
        options = tuple((name, value) for name, value in fields["source"].pop("options"))
        return cls(Origin(**fields["source"], options=options), Asked(**fields["asked"]))


def of(name: str, data_dir: Any, options: dict[str, Any]) -> Origin | None:
    """The origin of a source that was loaded by these arguments; `None` where JSON cannot carry an option."""
    try:
        carried = json.loads(json.dumps(options))
    except TypeError:
        return None
    return Origin(name, None if data_dir is None else str(data_dir), tuple(carried.items()))
