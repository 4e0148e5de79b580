"""The program `tfdist`: `tfdist train ...` is equivalent to `python -m tfdist.train ...`, and so on."""

from __future__ import annotations

import click

from tfdist import (
    __version__,
    advise,
    catalogue,
    compare,
    launch,
    memory,
    profile,
    report,
    simulate,
    terminal,
    train,
    verify,
)
from tfdist.data import __main__ as data
from tfdist.doctor import __main__ as doctor
from tfdist.pipeline_parallel import __main__ as stages

SECTIONS = {
    "Train": {"train": train.command, "launch": launch.command},
    "What there is": catalogue.COMMANDS,
    "Before a training": {
        "data": data.command,
        "verify": verify.command,
        "memory": memory.command,
        "pipeline": stages.command,
        "advise": advise.command,
        "simulate": simulate.command,
    },
    "Measured": {"compare": compare.command, "report": report.command, "profile": profile.command},
    "This machine": {"doctor": doctor.command, "env": doctor.environment_command},
}


@click.command(cls=terminal.Program, sections=SECTIONS)
@click.version_option(__version__)
def main() -> None:
    """Train Keras 3 models on more than one device: exact, fast and measured."""


if __name__ == "__main__":
    main()
