"""What a study measures: cells, each a strategy on a case, measured once in every round.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdist import strategies
from tfdist.errors import UnknownNameError, UsageError
from tfdist.run.config import INPUTS, STRATEGY_FLAGS

# Options of `tfdist train` that every run of a study has alike, as an option of `compare` or in a file's `[train]`.
OF_TRAIN = (
    *("data_option", "data_dir", "augment", "on_bad_example", "limit"),
    *("model_option", "dtype_policy"),
    *("optimizer", "learning_rate", "momentum", "weight_decay", "schedule", "warmup_epochs", "gradient_accumulation"),
)
# Those that a strategy of a study's file may have besides.
OF_A_STRATEGY = ("strategy_option", "ps", *STRATEGY_FLAGS)

REAL, SYNTHETIC = "real", "synthetic"


@dataclass(frozen=True)
class Contestant:
    """A strategy of a study.

    Attributes:
        strategy: its name, or `module:Class`.
        label: what tables call it; "" for its name.
        workers: the numbers of workers to measure it with; () for those of the study.
        train: more options of `tfdist train`, by name, of this strategy alone.
    """

    strategy: str
    label: str = ""
    workers: tuple[int, ...] = ()
    train: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strategies.traits(self.strategy)  # which knows the names


@dataclass(frozen=True)
class Case:
    """The work that strategies are compared on.

    Attributes:
        model, dataset: by name.
        batch_size: examples in a global batch.
        input: of training steps, one of `tfdist.run.config.INPUTS`.
    """

    model: str
    dataset: str
    batch_size: int
    input: str = REAL

    @property
    def title(self) -> str:
        """Such as `cnn on digits, global batch 32`."""
        of = "" if self.input == REAL else f", {self.input} input"
        return f"{self.model} on {self.dataset}, global batch {self.batch_size}{of}"


@dataclass(frozen=True)
class Cell:
    """A strategy with a number of workers on a case.

    Attributes:
        case: the work.
        strategy: its name.
        workers: processes, or the devices of a strategy that has one process.
        label: what tables call the strategy.
        train: the options of `tfdist train` by name.
    """

    case: Case
    strategy: str
    workers: int
    label: str
    train: Mapping[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @property
    def name(self) -> str:
        """The label, with the number of workers where another would be possible."""
        return self.label if self.strategy == "single" else f"{self.label} on {self.workers}"

    @property
    def folder(self) -> str:
        """A name for the folder of its runs."""
        case = self.case
        of = "" if case.input == REAL else f"{case.input}-"
        whole = f"{case.model}-{case.dataset}-{case.batch_size}-{of}{self.label}-{self.workers}"
        return re.sub(r"[^A-Za-z0-9_.-]", ".", whole)

    def options(self, epochs: int, seed: int) -> list[str]:
        """The options of `tfdist train` for one run of it."""
        alike: dict[str, Any] = {"strategy": self.strategy, "model": self.case.model, "dataset": self.case.dataset}
        alike |= {"batch_size": self.case.batch_size, "epochs": epochs, "seed": seed}
        if self.strategy != "single":
            alike["workers" if strategies.traits(self.strategy).processes else "devices"] = self.workers
        alike |= {} if self.case.input == REAL else {"input": self.case.input}
        return as_options({**alike, **self.train})


@dataclass(frozen=True)
class Plan:
    """A study.

    Attributes:
        models: names of models, or `module:function`.
        datasets: names of datasets, or `module:function`.
        contestants: the strategies; the first one is what the others are compared with, unless `single` is there.
        workers: numbers of workers.
        batch_sizes: examples in a global batch.
        inputs: of training steps, of `tfdist.run.config.INPUTS`. With "real" and "synthetic" among them, the report
            says what bounds the training, for which each cell with synthetic input is run once more, with a trace.
        repeats: how many times each cell is measured with each seed.
        seeds: how many seeds, from 0.
        epochs: epochs of each run, of which the first one warms up.
        steps: steps of an epoch; `None` is the whole dataset.
        target_accuracy: validation accuracy at which a run stops, 0 to 1; `None` trains all epochs.
        trace: whether each cell is run once more, with a trace of some steps; that run's times do not count.
        train: the options of `tfdist train` that all runs have.

    Raises:
        UsageError: a number that cannot be, or nothing to compare.
    """

    models: tuple[str, ...]
    datasets: tuple[str, ...]
    contestants: tuple[Contestant, ...]
    workers: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (32,)
    inputs: tuple[str, ...] = (REAL,)
    repeats: int = 5
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
        counts: dict[str, tuple[int, ...]] = {name: (getattr(self, name),) for name in ("repeats", "seeds", "epochs")}
        counts |= {"workers": self.workers, "batch_sizes": self.batch_sizes}
        counts |= {"steps": () if self.steps is None else (self.steps,)}
        for name, values in counts.items():
            for value in values:
                if not isinstance(value, int) or value < 1:
                    raise UsageError(f"`{name}` of the study is {value!r}", "give whole numbers from 1 on")
        for name in self.inputs:
            if name not in INPUTS:
                raise UnknownNameError("input", name, INPUTS)
        if self.steps is not None and "limit" in self.train:
            raise UsageError(
                "`steps` is set beside `limit`, which both say how many examples an epoch has", "leave one out"
            )

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """The number and the seed of each round; in a round every cell is measured once."""
        return list(enumerate(seed for _ in range(self.repeats) for seed in range(self.seeds)))

    def cells(self) -> list[Cell]:
        """All cells, those of a case together."""
        work = itertools.product(self.models, self.datasets, self.batch_sizes, self.inputs)
        cases = list(itertools.starmap(Case, work))
        return [
            self._cell(case, one, count) for case in cases for one in self.contestants for count in self._counts(one)
        ]

    def traced(self) -> list[Cell]:
        """The cells that are run once more, with a trace."""
        verdict = {REAL, SYNTHETIC} <= set(self.inputs)
        return [cell for cell in self.cells() if self.trace or (verdict and cell.case.input == SYNTHETIC)]

    def _counts(self, contestant: Contestant) -> Sequence[int]:
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
    """The fields of a `Plan` that the TOML file `path` sets.

    A strategy is a name, or a table with `strategy` and the other attributes of `Contestant`; `seeds` and the other
    fields are as in `Plan`.

    Raises:
        UsageError: the file cannot be read, or has an entry that a study does not have.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The study `{path}` cannot be read: {error}", "give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The study `{path}` is no TOML: {error}", "see docs/compare.md for an example") from error
    known = set(Plan.__dataclass_fields__) - {"contestants"} | {"strategies"}
    _refuse_unknown(path, "", entries, known)
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in entries.items()}
    found["train"] = _train_options(path, "[train]", entries.get("train", {}))
    if "strategies" in found:
        found["contestants"] = tuple(_contestant(path, entry) for entry in found.pop("strategies"))
    return found


def _contestant(path: Path, entry: Any) -> Contestant:
    if isinstance(entry, str):
        return Contestant(entry)
    _refuse_unknown(path, "a strategy's ", entry, set(Contestant.__dataclass_fields__))
    if "strategy" not in entry:
        raise UsageError(f"In `{path}` a table of `strategies` has no `strategy`", 'write `strategy = "mirrored"`')
    options = _train_options(path, "a strategy's `train`", entry.get("train", {}), of_strategy=True)
    return Contestant(**{**entry, "workers": tuple(entry.get("workers", ())), "train": options})


def _train_options(path: Path, where: str, options: Mapping[str, Any], of_strategy: bool = False) -> dict[str, Any]:
    found = {name.replace("-", "_"): value for name, value in options.items()}
    known = {*OF_TRAIN, *OF_A_STRATEGY} if of_strategy else set(OF_TRAIN)
    _refuse_unknown(path, f"{where}: ", found, known)
    return found


def _refuse_unknown(path: Path, where: str, entries: Mapping[str, Any], known: set[str]) -> None:
    for name in entries:
        if name not in known:
            raise UsageError(f"In `{path}`, {where}`{name}` is no entry", f"there are {', '.join(sorted(known))}")


def as_options(values: Mapping[str, Any]) -> list[str]:
    """The command-line options for values by name; a list repeats its option, `None` leaves it out."""
    found = []
    for name, value in values.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None:
                found += [f"--{name.replace('_', '-')}", str(one)]
    return found
