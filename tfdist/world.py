"""`python -m tfdist.world`, or `tfdist env`: what this process takes itself to be in its job, and from what."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from tfdist import terminal
from tfdist.cluster.world import World


@click.command(cls=terminal.Command, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Show what this process is in its job (rank, world size, addresses), and which variables say so."""
    world = World.detect()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("source", world.source)
    table.add_row("rank", f"{world.rank} of {world.world_size}")
    table.add_row("local rank", f"{world.local_rank} of {world.local_world_size}")
    for rank, task in enumerate(world.tasks):
        table.add_row(f"rank {rank}", f"{task}{', this process' if rank == world.rank else ''}")
    # Addresses are for copying: no line breaks, no colours, nothing taken for markup.
    with terminal.any_stdout(needed=True):
        Console(soft_wrap=True, highlight=False, markup=False).print(table)


def main() -> None:
    """The command."""
    command(prog_name="python -m tfdist.world")


if __name__ == "__main__":
    main()
