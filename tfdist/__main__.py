"""The program `tfdist`: `tfdist train ...` is `python -m tfdist.train ...`, and so on."""

from __future__ import annotations

import click

from tfdist import __version__, advise, compare, launch, memory, profile, report, train, verify
from tfdist.data import __main__ as data
from tfdist.doctor import __main__ as doctor
from tfdist.doctor import environment
from tfdist.stages import __main__ as stages


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Train Keras 3 models on more than one device: exact, fast and measured."""


main.add_command(train.command, "train")
main.add_command(launch.command, "launch")
main.add_command(data.command, "data")
main.add_command(stages.command, "pipeline")
main.add_command(memory.command, "memory")
main.add_command(verify.command, "verify")
main.add_command(profile.command, "profile")
main.add_command(compare.command, "compare")
main.add_command(report.command, "report")
main.add_command(advise.command, "advise")
main.add_command(doctor.command, "doctor")
main.add_command(environment.command, "env")

if __name__ == "__main__":
    main()
