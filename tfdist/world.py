"""`python -m tfdist.world`: shows the rank, world size and addresses of this process's job, and their source."""

from __future__ import annotations

from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table

from tfdist import terminal
from tfdist.jobs.world import World


@click.command(cls=terminal.Command)
def command() -> None:
    """Show the rank, world size and addresses of this process's job, and the variables that they come from."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows(World.detect()):
        table.add_row(*row)
    # Addresses are for copying, so there are no line breaks, colours or markup.
    with terminal.guarded_stdout(needed=True):
        Console(soft_wrap=True, highlight=False, markup=False).print(table)


def rows(world: World) -> Iterator[tuple[str, str]]:
    """Names and values that describe a job."""
    yield "source", world.source
    if world.is_evaluator:
        yield "evaluator", f"{world.evaluator}, which takes no part in the training"
        return
    yield "rank", f"{world.rank} of {world.world_size}"
    yield "local rank", f"{world.local_rank} of {world.local_world_size}"
    for rank, task in enumerate(world.tasks):
        yield f"rank {rank}", f"{task}{', this process' if rank == world.rank else ''}"


def main() -> None:
    """Runs the command."""
    command(prog_name="python -m tfdist.world")


if __name__ == "__main__":
    main()
