"""Describes where data come from, so that another process can read the same data: names and numbers, not the data.

    Origin        the arguments of `tfdist.data.load`, and what was done to the source afterwards
    FeedOrigin    the arguments of that source's `feed`

The workers of a `parameter_server` job, which run no program of the user's, read their data with it.
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
        name: the dataset's name, as `tfdist.data.load` takes it.
        data_dir: the folder of prepared datasets, if the user named one.
        options: the options of the dataset: pairs of a name and a value that JSON can represent.
        limit: the number of training examples that the source was limited to, if it was.
        autoencoding: whether it was changed to autoencoding.
        cached: whether its examples are read once, into memory.
    """

    name: str
    data_dir: str | None
    options: tuple[tuple[str, Any], ...]
    limit: int | None = None
    autoencoding: bool = False
    cached: bool = False


@dataclass(frozen=True)
class FeedArguments:
    """The arguments of `Source.feed` except `world`."""

    split: str
    global_batch_size: int
    seed: int
    shuffle: bool | None
    augment: str
    stream_positions: bool = False


@dataclass(frozen=True)
class PipelineArguments:
    """The arguments of `Source.pipeline` except `threads`; those that `Source.feed` has too are in `feed`."""

    feed: FeedArguments
    world: World
    deterministic: bool = True
    by_file: bool = False
    epoch: int = 0
    first_batch: int = 0


@dataclass(frozen=True)
class FeedOrigin:
    """How a feed was made: with these `arguments`, by the source with the origin `source`."""

    source: Origin
    arguments: FeedArguments

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> FeedOrigin:
        """Reads what `to_json` wrote."""
        fields = json.loads(line)
        options = tuple((name, value) for name, value in fields["source"].pop("options"))
        return cls(Origin(**fields["source"], options=options), FeedArguments(**fields["arguments"]))


def origin_of(name: str, data_dir: Any, options: dict[str, Any]) -> Origin | None:
    """The origin of a source that was loaded with these arguments; `None` if JSON cannot represent an option."""
    try:
        represented = json.loads(json.dumps(options))
    except TypeError:
        return None
    return Origin(name, None if data_dir is None else str(data_dir), tuple(represented.items()))
