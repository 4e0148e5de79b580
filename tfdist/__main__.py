"""The program `tfdist`: `tfdist train ...` is equivalent to `python -m tfdist.train ...`, and so on."""

from __future__ import annotations

import click

from tfdist import __version__, advise, compare, launch, memory, profile, report, simulate, train, verify
from tfdist.data import __main__ as data
from tfdist.doctor import __main__ as doctor
from tfdist.pipeline_parallel import __main__ as stages


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Train Keras 3 models on more than one device: exact, fast and measured."""


COMMANDS = {
    "train": train,
    "launch": launch,
    "data": data,
    "pipeline": stages,
    "memory": memory,
    "verify": verify,
    "profile": profile,
    "compare": compare,
    "report": report,
    "advise": advise,
    "simulate": simulate,
    "doctor": doctor,
}
for name, module in COMMANDS.items():
    main.add_command(module.command, name)
main.add_command(doctor.environment_command, "env")

if __name__ == "__main__":
    main()
