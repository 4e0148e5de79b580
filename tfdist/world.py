"""`python -m tfdist.world`: what this process takes itself to be in its job, and from what."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from tfdist import terminal
from tfdist.cluster.world import World
from tfdist.errors import UsageError


def main() -> int:
    """Prints what was detected and from where; 2 if that cannot be."""
    try:
        world = World.detect()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("source", world.source)
    table.add_row("rank", f"{world.rank} of {world.world_size}")
    table.add_row("local rank", f"{world.local_rank} of {world.local_world_size}")
    for rank, task in enumerate(world.tasks):
        table.add_row(f"rank {rank}", f"{task}{', this process' if rank == world.rank else ''}")
    # Addresses are for copying: no line breaks, no colours, nothing taken for markup.
    with terminal.any_stdout(needed=True):
        Console(soft_wrap=True, highlight=False, markup=False).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
