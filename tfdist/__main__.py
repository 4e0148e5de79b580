"""The program `tfdist`: `tfdist train ...` is `python -m tfdist.train ...`."""

from __future__ import annotations

import click

from tfdist import __version__
from tfdist.train import command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Train Keras 3 models on more than one device: exact, fast and measured."""


main.add_command(command, "train")

if __name__ == "__main__":
    main()
