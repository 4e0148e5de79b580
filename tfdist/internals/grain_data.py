"""The private parts of Grain 0.2.18 that tfdist reads."""

from __future__ import annotations

from typing import Any


def shard_of(data: Any) -> tuple[int, int] | None:
    """The index of the shard that a `DataLoader` reads, and the number of shards; `None` for Grain's datasets."""
    options = getattr(data, "_shard_options", None)
    return None if options is None else (options.shard_index, options.shard_count)
