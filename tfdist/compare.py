"""`tfdist compare`: measures strategies on equal work, in turns, and reports what came out.

    tfdist compare --strategies single,mirrored,custom --workers 1,2 --model cnn --dataset digits

Each run is a `tfdist train` of its own, whose folder stays; `tfdist report` makes the report again from them.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tfdist import data, models, registry, report, strategies, terminal, train
from tfdist.errors import UsageError
from tfdist.study import measure, plan
from tfdist.study.display import Display

SECONDS_OF_A_RUN = 3600.0  # the longest, if the user does not say another

_what = terminal.options_of("What is measured")
_how = terminal.options_of("How it is measured")


def _list(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in _list(text) or ())
    except ValueError:
        raise UsageError(f"`{option}` is `{text}`", f"give whole numbers, such as `{option} 1,2`") from None


@_what("--strategies", metavar="NAMES", help="strategies, divided by commas: " + ", ".join(strategies.names()))
@_what("--model", metavar="NAMES", help="models, divided by commas, or your own as module:function")
@_what("--dataset", metavar="NAMES", help="datasets, divided by commas, or your own as module:function")
@_what("--workers", metavar="N,...", help="numbers of processes, or of devices of a strategy with one process [1]")
@_what("--batch-size", metavar="N,...", help="examples per global batch [32]")
@_what("--input", metavar="NAMES", help="real, cached, synthetic, divided by commas: says what bounds the training")
@_what("--matrix", type=click.Path(path_type=Path), metavar="FILE", help="a study as a TOML file; options replace it")
@_how("--repeats", type=int, metavar="N", help="runs of each strategy with each seed [5]")
@_how("--seeds", type=int, metavar="N", help="seeds, from 0 [1]")
@_how("--epochs", type=int, metavar="N", help="epochs of a run, of which the first one warms up [5]")
@_how("--steps", type=int, metavar="N", help="steps of an epoch, instead of the whole dataset")
@_how("--target-accuracy", type=float, metavar="FRACTION", help="end each run at this validation accuracy")
@_how("--trace", is_flag=True, default=None, help="one more run of each, traced: what a step is spent on")
@_how("--run-seconds", type=float, default=SECONDS_OF_A_RUN, show_default=True, help="end a run that takes longer")
@_how("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="folder of the runs and the report")
@_how("--resume", is_flag=True, help="make the runs that are missing in --out, or failed")
@report.price_option
@report.tensorboard_option
def _compare(
    strategies: str | None,
    model: str | None,
    dataset: str | None,
    workers: str | None,
    batch_size: str | None,
    input: str | None,
    matrix: Path | None,
    run_seconds: float,
    out: Path | None,
    resume: bool,
    price: str | None,
    tensorboard: Path | None,
    **options: Any,
) -> int:
    """Measure strategies on equal work, in turns, and report which one is fastest by how much."""
    prices = report.prices_of(price)
    found = {} if matrix is None else plan.read(matrix)
    names = _list(strategies)
    given = {
        "models": _list(model),
        "datasets": _list(dataset),
        "contestants": None if names is None else tuple(plan.Contestant(name) for name in names),
        "workers": _numbers(workers, "--workers"),
        "batch_sizes": _numbers(batch_size, "--batch-size"),
        "inputs": _list(input),
    }
    of_plan = {field.name for field in fields(plan.Plan)}
    given |= {name: options.pop(name) for name in list(options) if name in of_plan}
    found |= {name: value for name, value in given.items() if value is not None}
    source = click.get_current_context().get_parameter_source
    own = {name: value for name, value in options.items() if source(name) is click.core.ParameterSource.COMMANDLINE}
    found["train"] = {**found.get("train", {}), **own}
    for name, option in (("contestants", "--strategies"), ("models", "--model"), ("datasets", "--dataset")):
        if not found.get(name):
            raise UsageError(f"`{option}` is not set", f"name at least one with `{option}`, or in a `--matrix` file")
    study = plan.Plan(**found)
    _check_names(study)
    folder = out or Path("studies") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    failed = run(study, folder, resume, run_seconds)
    report.show([folder], folder, prices, tensorboard)
    return int(failed)


def _check_names(study: plan.Plan) -> None:
    """Refuses what no run could use, before the first one is made."""
    for kind, names, known in (("model", study.models, models.names()), ("dataset", study.datasets, data.names())):
        for name in names:
            if ":" not in name:
                registry.require_known(name, kind, known)


def run(study: plan.Plan, out: Path, resume: bool, run_seconds: float) -> bool:
    """Makes the runs of a study in `out`; returns whether one has failed."""
    begun = measure.begin(study, out, resume)
    turns = measure.turns(study, out)
    left = [turn for turn in turns if not measure.is_done(turn)]
    measured: list[measure.Measured] = []
    with Display(Console(stderr=True), len(turns), len(turns) - len(left)) as display:
        for index, turn in enumerate(left):
            display.begin(turn, measure.expected_seconds(left[index:], measured))
            measured.append(measure.run(turn, study, begun, run_seconds))
            display.end(measured[-1])
    return any(one.exit_code for one in measured)


command = terminal.Command(
    "compare",
    callback=_compare,
    help=_compare.__doc__,
    params=[
        *reversed(getattr(_compare, "__click_params__", [])),
        *(option for option in train.command.params if option.name in plan.TRAIN_OPTIONS),
    ],
    context_settings=train.command.context_settings,
)


def main() -> None:
    """The command."""
    command(prog_name="python -m tfdist.compare")


if __name__ == "__main__":
    main()
