"""A study of algorithms on simulated workers: every algorithm, number of workers and seed of a file, and its table.

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

`published` is a number to show beside the accuracies. Runs that are in the folder of results already are not repeated.
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

Whole = Annotated[int, Field(ge=1)]
# As in `tfdist.simulator.study`, which imports TensorFlow.
ALGORITHMS = (
    *("allreduce", "bsp", "asp", "ssp"),
    *("average", "slowmo", "diloco", "easgd"),
    *("downpour", "aeasgd", "eamsgd"),
    *("dpsgd", "sgp", "gosgd", "adpsgd"),
)
RESULTS, TABLE, PICTURE = "results.json", "table.md", "accuracy.svg"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Case(_Part):
    """A model and its data; `examples` are those of training that are used, all if `None`."""

    model: str
    dataset: str
    data_dir: Path | None = None
    batch_size: Whole = 128
    examples: Whole | None = None
    epochs: Whole = 3
    optimizer: str | None = None
    learning_rate: float | None = None

    @property
    def title(self) -> str:
        """Such as `cnn on fashion_mnist`."""
        return f"{self.model} on {self.dataset}"


class Entry(_Part):
    """An algorithm with its options, see `tfdist.simulator.study.Settings`.

    With `divide_rate` the learning rate is divided by the number of workers: a server that takes in each gradient as it
    comes takes as many steps for a global batch.
    """

    algorithm: str
    label: str
    sync_every: Whole | None = None
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
        """Those of the algorithm that are set."""
        own = self.model_dump(exclude={"algorithm", "label", "divide_rate", "published"})
        return {name: value for name, value in own.items() if value is not None}


class Machine(_Part):
    """The simulated machine; see docs/simulator.md."""

    speeds: tuple[Annotated[float, Field(gt=0)], ...] = (1.0,)
    step_seconds: Annotated[float, Field(gt=0)] = 0.01
    bandwidth: str = "10Gbit"
    latency: str = "50us"


class Study(Machine):
    """What a file says."""

    cases: list[Case] = Field(min_length=1)
    algorithms: list[Entry] = Field(min_length=1)
    workers: list[Whole] = Field(min_length=1)
    seeds: Whole = 1

    @model_validator(mode="after")
    def _has_a_rate_to_divide(self) -> Study:
        if any(one.divide_rate for one in self.algorithms) and any(one.learning_rate is None for one in self.cases):
            raise ValueError("`divide_rate` needs a `learning_rate` in each case")
        return self

    @property
    def machine(self) -> Machine:
        """The machine that all runs are on."""
        return Machine(**{name: getattr(self, name) for name in Machine.model_fields})


@dataclass(frozen=True)
class Run:
    """One run of a study."""

    machine: Machine
    case: Case
    entry: Entry
    workers: int
    seed: int

    @property
    def key(self) -> str:
        """What tells it from all others, however the file is changed."""
        entry = self.entry.model_dump_json(exclude={"label", "published"})
        return f"{self.machine.model_dump_json()} {self.case.model_dump_json()} {entry} {self.workers} {self.seed}"


@dataclass
class Results:
    """The results of runs by their keys, kept in a file."""

    path: Path
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Results:
        """Those in a folder."""
        path = folder / RESULTS
        return cls(path, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})

    def add(self, run: Run, last: Any) -> None:
        """Keeps the state after the last epoch of `run`."""
        self.found[run.key] = dataclasses.asdict(last)
        files.write_text(self.path, json.dumps(self.found, indent=1) + "\n")


def read(path: Path) -> Study:
    """The study of a file.

    Raises:
        UsageError: it cannot be read, or says something that cannot be.
    """
    try:
        return Study.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"The study `{path}` cannot be read: {error}", "see docs/simulator.md") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"`{where}` of the study `{path}`: {first['msg'].lower()}", "see docs/simulator.md") from error


def runs(study: Study) -> Iterator[Run]:
    """All runs; those that share a model, a seed and a number of workers follow each other."""
    for case, seed, workers in itertools.product(study.cases, range(study.seeds), study.workers):
        for entry in study.algorithms:
            yield Run(study.machine, case, entry, workers, seed)


def table(study: Study, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The accuracies in Markdown: the mean over the seeds, and half of their range."""
    lines = []
    for case in study.cases:
        header = [case.title, *(f"{count} workers" for count in study.workers), "staleness", "MiB sent", "published"]
        lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for entry in study.algorithms:
            cells = [_of_seeds(study, found, Run(study.machine, case, entry, count, 0)) for count in study.workers]
            most = found.get(Run(study.machine, case, entry, study.workers[-1], 0).key, {})
            stale = most.get("staleness")
            sent = f"{most['sent_bytes'] / 2**20:,.0f}" if most else ""
            extra = ["" if stale is None else f"{stale:.1f}", sent]
            published = "" if entry.published is None else f"{entry.published:g}"
            lines.append("| " + " | ".join([entry.label, *cells, *extra, published]) + " |")
        lines.append("")
    return "\n".join(lines)


def accuracies(study: Study, found: Mapping[str, Mapping[str, Any]], run: Run) -> list[float]:
    """The test accuracies of a run with each seed, of those that are there."""
    keys = [dataclasses.replace(run, seed=seed).key for seed in range(study.seeds)]
    return [found[key]["metrics"]["accuracy"] for key in keys if key in found]


def _of_seeds(study: Study, found: Mapping[str, Mapping[str, Any]], run: Run) -> str:
    values = accuracies(study, found, run)
    if not values:
        return ""
    spread = (max(values) - min(values)) / 2
    return f"{statistics.mean(values):.3f}" + (f" ± {spread:.3f}" if len(values) > 1 else "")


def draw(study: Study, found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draws the mean accuracy by the number of workers, a panel for each case."""
    import altair

    points = [
        {
            "case": case.title,
            "algorithm": entry.label,
            "workers": count,
            "test accuracy": statistics.mean(values),
        }
        for case in study.cases
        for entry in study.algorithms
        for count in study.workers
        if (values := accuracies(study, found, Run(study.machine, case, entry, count, 0)))
    ]
    labels = [entry.label for entry in study.algorithms]
    chart = (
        altair.Chart(altair.Data(values=points))
        .mark_line(point=True)
        .encode(
            x=altair.X("workers:Q", axis=altair.Axis(values=study.workers)),
            y=altair.Y("test accuracy:Q", scale=altair.Scale(zero=False)),
            color=altair.Color("algorithm:N", sort=labels, scale=altair.Scale(scheme="tableau20")),
            shape=altair.Shape("algorithm:N", sort=labels),
            column=altair.Column("case:N", title=None),
        )
        .properties(width=320, height=320)
    )
    chart.save(str(path))
