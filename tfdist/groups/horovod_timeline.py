"""Merges the timelines of Horovod's ranks into one file, for Chrome or Perfetto.

    t.rank-0.json, t.rank-1.json, ...    written by each rank: one process per tensor
    t.json                               merged by rank 0: one process per rank, one thread per tensor

Each rank's file gets its name when it is complete, at the end of the program.

Sources: horovod/common/timeline.cc of Horovod 0.28.1; Trace Event Format, the Chromium project.

Synopsis:

    >>> print(of_rank(Path("logs/t.json"), 1))
    logs/t.rank-1.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfdist import files
from tfdist.errors import UsageError

# How long rank 0 waits for files that other ranks on its file system have begun.
SECONDS_FOR_OTHERS = 20.0

Event = dict[str, Any]


def of_rank(path: Path, rank: int) -> Path:
    """The path of a rank's complete timeline."""
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def begin(path: Path, rank: int) -> Path:
    """Creates the file into which Horovod is to write the timeline of this rank, and returns its path.

    Raises:
        UsageError: the file cannot be written.
    """
    complete = of_rank(path, rank)
    try:
        complete.parent.mkdir(parents=True, exist_ok=True)
        complete.unlink(missing_ok=True)  # left by an earlier run
        _unfinished(complete).touch()
    except OSError as error:
        raise UsageError(
            f"The timeline cannot be written to `{path}`: {error.strerror}", "choose another file for the timeline"
        ) from error
    return _unfinished(complete)


def end(path: Path, rank: int, world_size: int) -> None:
    """Completes a rank's file once Horovod has closed it; rank 0 also merges the files that are on its file system."""
    complete = of_rank(path, rank)
    unfinished = _unfinished(complete)
    if unfinished.stat().st_size:
        unfinished.replace(complete)
    else:
        unfinished.unlink()
    if rank != 0:
        return
    paths = [of_rank(path, other) for other in range(world_size)]
    until = time.monotonic() + SECONDS_FOR_OTHERS
    while any(_unfinished(other).exists() for other in paths) and time.monotonic() < until:
        time.sleep(0.05)
    traces = {other: json.loads(file.read_text()) for other, file in enumerate(paths) if file.exists()}
    files.write_text(path, json.dumps(list(joined(traces)), separators=(",", ":")))


def joined(traces: Mapping[int, list[Event]]) -> Iterator[Event]:
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
