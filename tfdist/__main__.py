"""The program `tfdist`: `tfdist train ...` is equivalent to `python -m tfdist.train ...`, and so on."""

from __future__ import annotations

import click

from tfdist import __version__, terminal

# Where each command is. Only the command that is called is imported, so that lists and help come at once.
SECTIONS = {
    "Train": {"train": "tfdist.train:command", "launch": "tfdist.launch:command"},
    "What there is": {
        "strategies": "tfdist.catalogue:strategies_command",
        "models": "tfdist.catalogue:models_command",
        "datasets": "tfdist.catalogue:datasets_command",
    },
    "Before a training": {
        "data": "tfdist.data.__main__:command",
        "verify": "tfdist.verify:command",
        "memory": "tfdist.memory:command",
        "pipeline": "tfdist.pipeline_parallel.__main__:command",
        "advise": "tfdist.advise:command",
        "simulate": "tfdist.simulate:command",
    },
    "Measured": {
        "compare": "tfdist.compare:command",
        "report": "tfdist.report:command",
        "profile": "tfdist.profile:command",
    },
    "This machine": {
        "doctor": "tfdist.doctor.__main__:command",
        "env": "tfdist.doctor.__main__:environment_command",
    },
}


@click.command(cls=terminal.Program, sections=SECTIONS)
@click.version_option(__version__)
def main() -> None:
    """Train Keras 3 models on more than one device: exact, fast and measured."""


if __name__ == "__main__":
    main()
