"""The plan of a study: its cells, each a strategy on a case, which every round measures once.

Synopsis:

    >>> study = Plan(models=("mlp",), datasets=("digits",), contestants=(Contestant("single"), Contestant("custom")))
    >>> [cell.name for cell in study.cells()]
    ['single', 'custom on 1']
    >>> study.cells()[1].options(epochs=2, seed=0)[:4]
    ['--strategy', 'custom', '--model', 'mlp']
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfdist import strategies
from tfdist.errors import UnknownNameError, UsageError
from tfdist.run.config import INPUTS, STRATEGY_FLAGS

# Options of `tfdist train` that apply to all runs of a study, set as options of `compare` or in a file's `[train]`.
TRAIN_OPTIONS = (
    *("data_option", "data_dir", "augment", "on_bad_example", "limit"),
    *("model_option", "dtype_policy"),
    *("optimizer", "learning_rate", "momentum", "weight_decay", "schedule", "warmup_epochs", "gradient_accumulation"),
)
# Further options that a strategy in a study's file may set.
STRATEGY_OPTIONS = ("strategy_option", "ps", *STRATEGY_FLAGS)

REAL, SYNTHETIC = "real", "synthetic"


@dataclass(frozen=True)
class Contestant:
    """A strategy in a study.

    Attributes:
        strategy: the name of the strategy, or `module:Class`.
        label: its name in tables; "" for `strategy`.
        workers: the numbers of workers to measure it with; () for those of the study.
        train: further options of `tfdist train`, by name, for this strategy only.
    """

    strategy: str
    label: str = ""
    workers: tuple[int, ...] = ()
    train: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strategies.traits(self.strategy)  # refuses unknown names


@dataclass(frozen=True)
class Case:
    """The training that strategies are compared on.

    Attributes:
        model: the name of the model.
        dataset: the name of the dataset.
        batch_size: examples per global batch.
        input: the input of training steps, one of `tfdist.run.config.INPUTS`.
    """

    model: str
    dataset: str
    batch_size: int
    input: str = REAL

    @property
    def with_real_input(self) -> Case:
        """The same training with real input."""
        return replace(self, input=REAL)

    @property
    def title(self) -> str:
        """A title such as `cnn on digits, global batch 32`."""
        suffix = "" if self.input == REAL else f", {self.input} input"
        return f"{self.model} on {self.dataset}, global batch {self.batch_size}{suffix}"


@dataclass(frozen=True)
class Cell:
    """A strategy with a number of workers on a case.

    Attributes:
        case: the training.
        strategy: the name of the strategy.
        workers: the number of processes, or of devices for a strategy with a single process.
        label: the name of the strategy in tables.
        train: options of `tfdist train` by name.
    """

    case: Case
    strategy: str
    workers: int
    label: str
    train: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @property
    def name(self) -> str:
        """The label, with the number of workers except for `single`."""
        return self.label if self.strategy == "single" else f"{self.label} on {self.workers}"

    @property
    def folder(self) -> str:
        """The name of the folder of its runs."""
        case = self.case
        input_ = "" if case.input == REAL else f"{case.input}-"
        name = f"{case.model}-{case.dataset}-{case.batch_size}-{input_}{self.label}-{self.workers}"
        return re.sub(r"[^A-Za-z0-9_.-]", ".", name)

    def options(self, epochs: int, seed: int) -> list[str]:
        """Returns the options of `tfdist train` for a run."""
        options: dict[str, Any] = {"strategy": self.strategy, "model": self.case.model, "dataset": self.case.dataset}
        options |= {"batch_size": self.case.batch_size, "epochs": epochs, "seed": seed}
        if self.strategy != "single":
            options["workers" if strategies.traits(self.strategy).processes else "devices"] = self.workers
        options |= {} if self.case.input == REAL else {"input": self.case.input}
        return as_options({**options, **self.train})


@dataclass(frozen=True)
class Plan:
    """A study.

    Attributes:
        models: names of models, or `module:function`.
        datasets: names of datasets, or `module:function`.
        contestants: the strategies; the others are compared with `single` if it is among them, else with the first.
        workers: numbers of workers.
        batch_sizes: examples per global batch.
        inputs: inputs of training steps, from `tfdist.run.config.INPUTS`. With "real" and "synthetic", the report says
            what bounds the training; for that, each cell with synthetic input has an extra run with a trace.
        repeats: how many times each cell is measured with each seed; `None` for a number that depends on the results,
            see `tfdist.study.looks`.
        seeds: the number of seeds, which start from 0.
        epochs: epochs per run; the first warms up.
        steps: steps per epoch; `None` for the whole dataset.
        target_accuracy: validation accuracy at which a run stops, 0 to 1; `None` trains all epochs.
        trace: whether each cell has an extra run with a trace of some steps, whose times do not count.
        train: options of `tfdist train` for all runs.

    Raises:
        UsageError: a number is out of range, an input is unknown, or there is nothing to compare.
    """

    models: tuple[str, ...]
    datasets: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    workers: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (32,)
    inputs: tuple[str, ...] = (REAL,)
    repeats: int | None = None
    seeds: int = 1
    epochs: int = 5
    steps: int | None = None
    target_accuracy: float | None = None
    trace: bool = False
    train: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("models", "datasets", "contestants", "workers", "batch_sizes", "inputs"):
            if not getattr(self, name):
                raise UsageError(f"The study has no `{name}`", "name at least one")
        counts: dict[str, tuple[int, ...]] = {"workers": self.workers, "batch_sizes": self.batch_sizes}
        for name in ("repeats", "seeds", "epochs", "steps"):
            counts[name] = () if getattr(self, name) is None else (getattr(self, name),)
        for name, values in counts.items():
            for value in values:
                if not isinstance(value, int) or value < 1:
                    raise UsageError(f"`{name}` of the study is {value!r}", "use positive whole numbers")
        for name in self.inputs:
            if name not in INPUTS:
                raise UnknownNameError("input", name, INPUTS)
        ((folder, count),) = Counter(cell.folder for cell in self.cells()).most_common(1)
        if count > 1:
            raise UsageError(
                f"{count} cells of the study have the name `{folder}`",
                "give strategies that differ only in their options a `label` each",
            )
        if self.steps is not None and "limit" in self.train:
            raise UsageError(
                "`steps` and `limit` are both set, and each determines the examples of an epoch",
                "leave one of them out",
            )

    def cells(self) -> list[Cell]:
        """Returns all cells, grouped by case."""
        return [
            self._cell(Case(*case), contestant, workers)
            for case in itertools.product(self.models, self.datasets, self.batch_sizes, self.inputs)
            for contestant in self.contestants
            for workers in self._worker_counts(contestant)
        ]

    def traced(self) -> list[Cell]:
        """Returns the cells that have an extra run with a trace."""
        has_verdicts = {REAL, SYNTHETIC} <= set(self.inputs)
        return [cell for cell in self.cells() if self.trace or (has_verdicts and cell.case.input == SYNTHETIC)]

    def _worker_counts(self, contestant: Contestant) -> Sequence[int]:
        if contestant.strategy == "single":
            return (1,)
        return contestant.workers or self.workers

    def _cell(self, case: Case, contestant: Contestant, workers: int) -> Cell:
        options = {**self.train, **contestant.train}
        if self.steps is not None:
            options["limit"] = self.steps * case.batch_size
        if self.target_accuracy is not None:
            options["target_accuracy"] = self.target_accuracy
        return Cell(case, contestant.strategy, workers, contestant.label or contestant.strategy, options)


def read(path: Path) -> dict[str, Any]:
    """Reads the fields of a `Plan` that the TOML file `path` sets.

    The entries are the attributes of `Plan`, with `strategies` instead of `contestants`: names, or tables with the
    attributes of `Contestant`.

    Raises:
        UsageError: the file cannot be read, or has an unknown entry.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The study `{path}` cannot be read: {error}", "name a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"The study `{path}` is not valid TOML: {error}", "see docs/compare.md for an example"
        ) from error
    known = set(Plan.__dataclass_fields__) - {"contestants"} | {"strategies"}
    _refuse_unknown(path, "", entries, known)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
    fields["train"] = _train_options(path, "in [train]", entries.get("train", {}))
    if "strategies" in fields:
        fields["contestants"] = tuple(_contestant(path, entry) for entry in fields.pop("strategies"))
    return fields


def _contestant(path: Path, entry: Any) -> Contestant:
    if isinstance(entry, str):
        return Contestant(entry)
    _refuse_unknown(path, "in a strategy: ", entry, set(Contestant.__dataclass_fields__))
    if "strategy" not in entry:
        raise UsageError(f"In `{path}` a table in `strategies` has no `strategy`", 'add `strategy = "mirrored"`')
    options = _train_options(path, "in a strategy's `train`", entry.get("train", {}), of_strategy=True)
    return Contestant(**{**entry, "workers": tuple(entry.get("workers", ())), "train": options})


def _train_options(path: Path, where: str, options: Mapping[str, Any], of_strategy: bool = False) -> dict[str, Any]:
    by_name = {name.replace("-", "_"): value for name, value in options.items()}
    known = {*TRAIN_OPTIONS, *STRATEGY_OPTIONS} if of_strategy else set(TRAIN_OPTIONS)
    _refuse_unknown(path, f"{where}: ", by_name, known)
    return by_name


def _refuse_unknown(path: Path, where: str, entries: Mapping[str, Any], known: set[str]) -> None:
    for name in entries:
        if name not in known:
            raise UsageError(f"In `{path}`, {where}unknown entry `{name}`", f"use {', '.join(sorted(known))}")


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Returns command-line options for values by name; a list repeats its option, and `None` leaves it out."""
    options = []
    for name, value in values.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None:
                options += [f"--{name.replace('_', '-')}", str(item)]
    return options
