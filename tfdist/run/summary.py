"""The table that the command shows at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tfdist import terminal

if TYPE_CHECKING:
    from tfdist.run.folder import RunFolder
    from tfdist.run.schema import RunRecord


def print_table(rows: Sequence[tuple[str, str]]) -> None:
    """Shows names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


def rows(record: RunRecord, folder: RunFolder) -> list[tuple[str, str]]:
    """The results of a run, its speed, and where its files are."""
    test = record.test_metrics or {}
    found = [(f"test {name}", f"{value:.4f}") for name, value in sorted(test.items()) if value is not None]
    # The first epoch includes tracing the graph; it counts only if there is no other.
    epochs = record.epochs[1:] or record.epochs
    seconds = sum(epoch.train_seconds or 0 for epoch in epochs)
    examples = sum((epoch.examples_per_second or 0) * (epoch.train_seconds or 0) for epoch in epochs)
    if seconds and examples:
        found.append(("examples/s", f"{examples / seconds:,.0f}"))
    total = sum(epoch.train_seconds or 0 for epoch in record.epochs)
    found.append(("training time", f"{total:.1f} s in {terminal.counted(len(record.epochs), 'epoch')}"))
    if record.time_to_target is not None:
        reached = record.time_to_target.seconds
        goal = f"{record.time_to_target.monitor} {record.time_to_target.target:g}"
        found.append((f"time to {goal}", "not reached" if reached is None else f"{reached:.1f} s"))
    if record.peak_memory_bytes:
        found.append(("peak memory", f"{record.peak_memory_bytes / 2**20:,.0f} MiB"))
    return [*found, ("files", str(folder.path))]
