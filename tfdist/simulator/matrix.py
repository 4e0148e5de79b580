"""A study on simulated workers: all algorithms, numbers of workers and seeds of a TOML file, and its table.

    workers = [4, 24]
    seeds = 3

    [[cases]]
    model = "cnn"
    dataset = "fashion_mnist"
    examples = 6400
    epochs = 3

    [[algorithms]]
    algorithm = "gosgd"
    label = "GoSGD 0.1"
    probability = 0.1
    published = 0.4475

`published` is an accuracy to show next to the measured ones. Runs whose results exist are not repeated.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tfdist import files, registry
from tfdist.errors import UsageError
from tfdist.simulator import lines

PositiveInt = Annotated[int, Field(ge=1)]
# `NAMES` of `tfdist.simulator.simulation`, which imports TensorFlow.
ALGORITHMS = (
    *("allreduce", "bsp", "asp", "ssp"),
    *("average", "slowmo", "diloco", "easgd"),
    *("downpour", "aeasgd", "eamsgd"),
    *("dpsgd", "sgp", "gosgd", "adpsgd"),
)
# Those whose workers exchange with a centre.
CENTRED = ("bsp", "asp", "ssp", "downpour", "aeasgd", "eamsgd")
RESULTS, TABLE, PICTURE = "results.json", "table.md", "accuracy.svg"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Case(_Part):
    """A model and its data; `examples` limits the training examples."""

    model: str
    dataset: str
    data_dir: Path | None = None
    batch_size: PositiveInt = 128
    examples: PositiveInt | None = None
    epochs: PositiveInt = 3
    optimizer: str | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None

    @property
    def title(self) -> str:
        """The model and the dataset, such as `cnn on fashion_mnist`."""
        return f"{self.model} on {self.dataset}"


class Entry(_Part):
    """An algorithm with its options, see `tfdist.simulator.simulation.Settings`.

    `divide_rate` divides the learning rate by the number of workers, since an asynchronous server makes as many updates
    per global batch.
    """

    algorithm: str
    label: str
    sync_every: PositiveInt | None = None
    slack: int | None = None
    topology: str | None = None
    probability: float | None = None
    divide_rate: bool = False
    published: float | None = None

    @field_validator("algorithm")
    @classmethod
    def _known(cls, name: str) -> str:
        registry.require_known(name, "algorithm", ALGORITHMS)
        return name

    @property
    def options(self) -> dict[str, Any]:
        """The options of the algorithm that are set."""
        return self.model_dump(exclude={"algorithm", "label", "divide_rate", "published"}, exclude_none=True)


class Machine(_Part):
    """The simulated machine; see docs/simulator.md."""

    speeds: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)  # repeated in turn
    step_seconds: Annotated[float, Field(gt=0)] = 0.01
    bandwidth: str = "10Gbit"
    latency: str = "50us"
    links: tuple[str, ...] = ()  # see `tfdist.simulator.links`


class Study(Machine):
    """The content of a file."""

    cases: list[Case] = Field(min_length=1)
    algorithms: list[Entry] = Field(min_length=1)
    workers: list[PositiveInt] = Field(min_length=1)
    seeds: PositiveInt = 1

    @model_validator(mode="after")
    def _has_a_rate_to_divide(self) -> Study:
        divides = any(entry.divide_rate for entry in self.algorithms)
        if divides and any(case.learning_rate is None for case in self.cases):
            raise ValueError("`divide_rate` needs a `learning_rate` in each case")
        return self

    @property
    def machine(self) -> Machine:
        """The simulated machine of all runs."""
        return Machine(**{name: getattr(self, name) for name in Machine.model_fields})


@dataclass(frozen=True)
class Run:
    """A run of a study."""

    machine: Machine
    case: Case
    entry: Entry
    workers: int
    seed: int

    @property
    def key(self) -> str:
        """Identifies the run by everything that influences its result."""
        entry = self.entry.model_dump_json(exclude={"label", "published"})
        return f"{self.machine.model_dump_json()} {self.case.model_dump_json()} {entry} {self.workers} {self.seed}"


@dataclass
class Results:
    """The results of runs by their keys, stored in a file."""

    path: Path
    by_key: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Results:
        """Reads the results in a folder; there may be none."""
        path = folder / RESULTS
        return cls(path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def add(self, run: Run, last: Any) -> None:
        """Stores the result of the last epoch of `run`."""
        self.by_key[run.key] = dataclasses.asdict(last)
        files.write_text(self.path, json.dumps(self.by_key, indent=1) + "\n")


def read(path: Path) -> Study:
    """Reads a study from a file.

    Raises:
        UsageError: the file cannot be read, or an entry is not valid.
    """
    try:
        return Study.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The study `{path}` cannot be read: {error}", "see docs/simulator.md") from error
    except ValidationError as error:
        first = error.errors()[0]
        entry = ".".join(map(str, first["loc"]))
        raise UsageError(f"`{entry}` in the study `{path}`: {first['msg'].lower()}", "see docs/simulator.md") from error


def runs(study: Study) -> Iterator[Run]:
    """Yields all runs, seed by seed; runs that share a case and a number of workers follow each other."""
    for seed, case, workers in itertools.product(range(study.seeds), study.cases, study.workers):
        for entry in study.algorithms:
            yield Run(study.machine, case, entry, workers, seed)


def table(study: Study, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the results as a Markdown table.

    The accuracies are the mean over the seeds and half of their range, and "chance" where the mean may be no better.
    Simulated seconds, staleness and bytes are those of the largest number of workers.
    """
    lines = []
    for case in study.cases:
        header = [
            case.title,
            *(f"{count} workers" for count in study.workers),
            "seconds",
            "staleness",
            "MiB sent",
            "published",
        ]
        lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for entry in study.algorithms:
            cells = [_mean_accuracy(study, results, case, entry, count) for count in study.workers]
            largest = results.get(Run(study.machine, case, entry, study.workers[-1], 0).key, {})
            staleness = largest.get("staleness")
            cells.append(f"{largest['seconds']:.2f}" if largest else "")
            cells.append("" if staleness is None else f"{staleness:.1f}")
            cells.append(f"{largest['sent_bytes'] / 2**20:,.0f}" if largest else "")
            cells.append("" if entry.published is None else f"{entry.published:g}")
            lines.append("| " + " | ".join([entry.label, *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


def _accuracies(
    study: Study, results: Mapping[str, Mapping[str, Any]], case: Case, entry: Entry, workers: int
) -> list[float]:
    """The test accuracies with all seeds whose results exist."""
    keys = [Run(study.machine, case, entry, workers, seed).key for seed in range(study.seeds)]
    return [results[key]["metrics"]["accuracy"] for key in keys if key in results]


def shown(accuracy: float | None, chance: float | None, format_: str) -> str:
    """Returns the accuracy as text, which says so if it is not better than chance."""
    if accuracy is None:
        return ""
    return f"{accuracy:{format_}}" + (" (chance)" if chance is not None and accuracy <= chance else "")


def _mean_accuracy(
    study: Study, results: Mapping[str, Mapping[str, Any]], case: Case, entry: Entry, workers: int
) -> str:
    values = _accuracies(study, results, case, entry, workers)
    if not values:
        return ""
    half_range = (max(values) - min(values)) / 2
    chance = results[Run(study.machine, case, entry, workers, 0).key].get("chance")
    deviation = f" ± {half_range:.3f}" if len(values) > 1 else ""
    mean, words, end = shown(statistics.mean(values), chance, ".3f").partition(" (")
    return mean + deviation + words + end


def draw(study: Study, results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws the mean accuracy over the number of workers, with a panel for each case."""
    panels = {
        case.title: {
            entry.label: {
                count: statistics.mean(values)
                for count in study.workers
                if (values := _accuracies(study, results, case, entry, count))
            }
            for entry in study.algorithms
        }
        for case in study.cases
    }
    lines.panels(panels, x_title="workers", y_title="test accuracy").save(str(path))
