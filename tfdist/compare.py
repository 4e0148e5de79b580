"""`tfdist compare`: measures strategies on equal work, in turns, and reports the results.

    tfdist compare --strategies single,mirrored,custom --workers 1,2 --model cnn --dataset digits

Each run is a separate `tfdist train`, whose run folder is kept; `tfdist report` reports on these folders again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from tfdist import data, extras, models, registry, report, strategies, terminal, train
from tfdist.command_line import mistakes
from tfdist.errors import UsageError
from tfdist.study import measure, plan, stages
from tfdist.study.measure import Measured, Turn

SECONDS_PER_RUN = 3600.0  # default time limit

_what = terminal.options_of("What is measured")
_how = terminal.options_of("How it is measured")


def _list(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in _list(text) or ())
    except ValueError:
        raise UsageError(f"`{option}` is `{text}`", f"use whole numbers, such as `{option} 1,2`") from None


@_what("--strategies", metavar="NAMES", help="strategies, separated by commas: " + ", ".join(strategies.names()))
@_what("--model", metavar="NAMES", help="models, separated by commas, or your own as module:function")
@_what("--dataset", metavar="NAMES", help="datasets, separated by commas, or your own as module:function")
@_what("--workers", metavar="N,...", help="numbers of processes, or of devices for strategies of one process [1]")
@_what("--batch-size", metavar="N,...", help="examples per global batch [32]")
@_what("--input", metavar="NAMES", help="real, cached, synthetic, separated by commas; shows the bottleneck")
@_what("--matrix", type=click.Path(path_type=Path), metavar="FILE", help="a study as a TOML file; options override it")
@_how("--repeats", type=int, metavar="N", help="runs per strategy and seed; by default 4 to 8, as needed")
@_how("--seeds", type=int, metavar="N", help="number of seeds, from 0 [1]")
@_how("--epochs", type=int, metavar="N", help="epochs per run; the first epoch is a warm-up [5]")
@_how("--steps", type=int, metavar="N", help="steps per epoch, instead of the whole dataset")
@_how("--target-accuracy", type=float, metavar="FRACTION", help="end each run at this validation accuracy")
@_how("--trace", is_flag=True, default=None, help="an additional traced run per strategy: the time per step by cause")
@_how("--run-seconds", type=float, default=SECONDS_PER_RUN, show_default=True, help="time limit of a run")
@_how("--out", type=click.Path(path_type=Path), metavar="FOLDER", help="folder of the runs and the report")
@_how("--resume", is_flag=True, help="do only the runs that are missing in --out or failed")
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
    """Measure strategies on equal work, in turns, and report which strategy is fastest, and by how much."""
    require_extras(tensorboard is not None)
    prices = report.prices_of(price)
    settings = {} if matrix is None else plan.read(matrix)
    names = _list(strategies)
    set_options = {
        "models": _list(model),
        "datasets": _list(dataset),
        "contestants": None if names is None else tuple(plan.Contestant(name) for name in names),
        "workers": _numbers(workers, "--workers"),
        "batch_sizes": _numbers(batch_size, "--batch-size"),
        "inputs": _list(input),
    }
    plan_fields = {field.name for field in fields(plan.Plan)}
    set_options |= {name: options.pop(name) for name in list(options) if name in plan_fields}
    settings |= {name: value for name, value in set_options.items() if value is not None}
    source = click.get_current_context().get_parameter_source
    train = {name: value for name, value in options.items() if source(name) is click.core.ParameterSource.COMMANDLINE}
    settings["train"] = {**settings.get("train", {}), **train}
    _require(settings, {"contestants": "--strategies", "models": "--model", "datasets": "--dataset"})
    study = plan.Plan(**settings)
    _check_names(study)
    _check_steps(study)
    if resume and out is None:
        raise UsageError("`--resume` needs `--out`, which is not set", "name the study's folder with `--out`")
    folder = out or Path("studies") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    failed = run(study, folder, resume, run_seconds)
    report.show([folder], folder, prices, tensorboard)
    return int(failed)


def require_extras(tensorboard: bool) -> None:
    """Raises `MissingPackageError` before the first run if the report at the end could not be made."""
    extras.require("report", "The report of `tfdist compare`")
    if tensorboard:
        extras.require("profile", "`--tensorboard`")


def _require(settings: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Raises `UsageError` that names all `options` whose settings are missing."""
    missing = [option for name, option in options.items() if not settings.get(name)]
    if missing:
        sentence = f"{mistakes.listed(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        raise UsageError(sentence, "set them on the command line or in a `--matrix` file")


def _check_names(study: plan.Plan) -> None:
    """Raises `UnknownNameError` for an unknown model or dataset before the first run."""
    for kind, names, known in (("model", study.models, models.names()), ("dataset", study.datasets, data.names())):
        for name in names:
            if ":" not in name:
                registry.require_known(name, kind, known)


def _check_steps(study: plan.Plan) -> None:
    """Raises `UsageError` before the first run if an epoch of a dataset has fewer than `study.steps` steps."""
    if study.steps is None:
        return
    options = registry.parse_options(study.train.get("data_option") or (), "--data-option")
    for dataset in study.datasets:
        source = data.load(dataset, study.train.get("data_dir"), **options)
        for batch_size in study.batch_sizes:
            available = source.spec.examples["train"] // batch_size
            if study.steps > available:
                raise UsageError(
                    f"`--steps` is {study.steps}, and an epoch of `{dataset}` has {available} whole steps at a global "
                    f"batch of {batch_size}",
                    "use fewer steps, a smaller batch, or a dataset with more examples",
                )


def run(study: plan.Plan, out: Path, resume: bool, run_seconds: float) -> bool:
    """Makes the runs of a study in `out`, and returns whether a run failed."""
    begun = measure.begin(study, out, resume)
    results: list[measure.Measured] = []
    with Display(Console(stderr=True)) as display:
        display.announce(*(rounds * len(study.cells()) for rounds, _ in (begun.looks[0], begun.looks[-1])))
        for turns in stages.of(study, begun, out):
            remaining = [turn for turn in turns if not measure.is_done(turn)]
            display.extend(len(turns), len(turns) - len(remaining))
            for index, turn in enumerate(remaining):
                display.begin(turn, measure.expected_seconds(remaining[index:], results))
                results.append(measure.run(turn, study, begun, run_seconds))
                display.end(results[-1])
    return any(result.exit_code for result in results)


class Display:
    """The progress of a study: a line that changes on a terminal, with the expected time, and a line per finished run.

    The number of runs and the expected time are those until the next look at the results.
    """

    def __init__(self, console: Console):
        self._console = console
        self._runs = 0
        self._done = 0
        self._turn: Turn | None = None
        self._remaining: float | None = None
        self._started = 0.0
        self._live = Live(get_renderable=self._line, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def announce(self, least: int, most: int) -> None:
        """Prints how many runs the study has at least and at most, without those with a trace."""
        number = f"{least}" if least == most else f"{least} to {most}"
        self._console.print(f"{number} runs, each in processes of its own", highlight=False)

    def extend(self, runs: int, done: int) -> None:
        """Adds the runs of a stage, of which `done` were made earlier."""
        self._runs += runs
        self._done += done

    def begin(self, turn: Turn, remaining_seconds: float | None) -> None:
        """Shows that a run begins; it and the later runs are expected to take `remaining_seconds`."""
        self._turn, self._remaining, self._started = turn, remaining_seconds, time.monotonic()

    def end(self, measured: Measured) -> None:
        """Prints the result of the current run."""
        assert self._turn is not None
        self._done += 1
        failed = measured.exit_code != 0
        result = f"failed: {terminal.cause(measured.error)}" if failed else f"{measured.wall_seconds:.1f} s"
        self._console.print(Text(f"{self._position(self._done)} {self._turn.title}: {result}"), soft_wrap=True)

    def _line(self) -> Text:
        return Text("" if self._turn is None else f"{self._position(self._done + 1)} {self._turn.title} ...")

    def _position(self, number: int) -> str:
        """The number of a run with the remaining time, such as `[3/20, 0:05:00 left]`."""
        if self._remaining is None:
            return f"[{number}/{self._runs}]"
        seconds = max(0.0, self._remaining - (time.monotonic() - self._started))
        return f"[{number}/{self._runs}, {timedelta(seconds=round(seconds))} left]"


command = terminal.Command(
    "compare",
    callback=_compare,
    help=_compare.__doc__,
    params=[
        *reversed(getattr(_compare, "__click_params__", [])),
        *(option for option in train.command.params if option.name in plan.TRAIN_OPTIONS),
    ],
)


if __name__ == "__main__":
    command(prog_name="python -m tfdist.compare")
