"""Reports of a verification: the difference between a strategy and one device for each quantity, and a verdict.

A report shows its verdict first, with `print(report)`, at Python's prompt and in a notebook.
"""

from __future__ import annotations

import functools
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.internals import keras as keras_internals

TIMES_ROUNDING = 10


@dataclass(frozen=True)
class Entry:
    """The difference of one quantity in the first step in which it exceeds its tolerance, otherwise in the last step.

    Attributes:
        kind: "sum" (of a 1 for each number of a batch), "batch", "output", "added loss", "loss", "whole loss",
            "gradient", "weight", "state", "optimizer" or "log".
        name: the name of the part of the batch, the layer, the loss, the variable or the log.
        layer: the layer of the quantity, or the model.
        difference: the largest difference between the strategy and one device.
        sensitivity: the largest change on one device if each weight is changed by one bit.
        tolerance: the largest accepted difference.
        replicas_over_one: the size of the quantity on the strategy, divided by its size on one device.
        step: the first step, from 0, whose difference exceeds the tolerance; `None` if there is none.
    """

    kind: str
    name: str
    layer: str
    difference: float
    sensitivity: float
    tolerance: float
    replicas_over_one: float
    step: int | None


class Shown:
    """A report that shows its verdict above its table."""

    @property
    def verdict(self) -> str:
        """The result, in one sentence."""
        raise NotImplementedError

    @property
    def table(self) -> str:
        """The quantities, one per line below a header."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{self.table}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The report as HTML, for notebooks."""
        return f"<p><strong>{html.escape(self.verdict)}</strong></p>\n<pre>{html.escape(self.table)}</pre>"


@dataclass(frozen=True, repr=False)
class Report(Shown, Mapping[str, Entry]):
    """The entries of a verification, by kind and name, such as "weight dense/kernel".

    Attributes:
        entries: the entries in the order in which a step computes them.
        steps: the number of compared steps.
        of: a description of the strategy and its replicas.
    """

    entries: tuple[Entry, ...]
    steps: int
    of: str

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if f"{entry.kind} {entry.name}" == name:
                return entry
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (f"{entry.kind} {entry.name}" for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def first(self) -> Entry | None:
        """The first entry, in the order of computation, that differs in the earliest differing step."""
        steps = [entry.step for entry in self.entries if entry.step is not None]
        return next((entry for entry in self.entries if steps and entry.step == min(steps)), None)

    @property
    def verdict(self) -> str:
        if (first := self.first) is None:
            return f"The steps of {self.of} equal those of one device."
        return (
            f"The steps of {self.of} differ from those of one device, first in the {first.kind} `{first.name}` in step "
            f"{first.step}: by {first.difference:.3g}, where at most {first.tolerance:.3g} is rounding."
        )

    @property
    def table(self) -> str:
        width = max((len(name) for name in self), default=0)
        head = f"{'':{width}}  difference  one bit     tolerance   (steps: {self.steps})"
        lines = [
            f"{name:{width}}  {e.difference:<10.3g}  {e.sensitivity:<10.3g}  {e.tolerance:<10.3g}"
            + ("" if e.step is None else "  differs")
            for name, e in zip(self, self.entries, strict=True)
        ]
        return "\n".join([head, *lines])


# The arrays of a step by kind and name; for variables, their change since the start.
Step = dict[tuple[str, str], np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """Compares the steps on a strategy with those on one device.

    Attributes:
        model: the verified model.
        of: a description of the strategy and its replicas.
        groups: the variables by group, such as "optimizer".
        sizes: the largest absolute value in each variable, by the variable's path.
        seen: the layer, loss or variable of each recorded value, by the value's kind and name.
        epsilon: the machine epsilon of the coarsest dtype in which layers compute.
    """

    model: Any
    of: str
    groups: Mapping[str, Sequence[Any]]
    sizes: Mapping[str, float]
    seen: Mapping[tuple[str, str], Any]
    epsilon: float

    def report(self, reference: list[Step], nudged: list[list[Step]], actual: list[Step]) -> Report:
        """Compares the quantities that the reference, the nudged runs and the run on the strategy have in common."""

        def compared(key: tuple[str, str]) -> Entry:
            steps = [
                self._difference(key, step[key], [run[number][key] for run in nudged], actual[number][key])
                for number, step in enumerate(reference)
            ]
            return self._entry(key, steps)

        common = [key for key in reference[0] if all(key in step for step in (*reference, *actual))]
        inside = [compared(key) for key in self.seen if key in common]  # in the order of computation
        after = [compared(key) for key in common if key not in self.seen]
        return Report((*inside, *sorted(after, key=lambda entry: _AFTER.index(entry.kind))), len(reference), self.of)

    def _difference(
        self, key: tuple[str, str], expected: np.ndarray, nudged: Sequence[np.ndarray], actual: np.ndarray
    ) -> _Difference:
        kind, name = key
        sensitivity = max(_distance(values, expected) for values in nudged)
        size = float(np.max(np.abs(expected), initial=0))
        exact = kind == "variable" and expected.dtype.kind == "i"
        rounding = 0.0 if exact else math.sqrt(self.epsilon) * size
        if kind == "variable" and not exact:
            rounding += 4 * self.epsilon * (self.sizes[name] + size)  # the resolution of the variable's own values
        ratio = float(np.max(np.abs(actual), initial=0)) / size if size else math.inf
        return _Difference(_distance(actual, expected), sensitivity, TIMES_ROUNDING * sensitivity + rounding, ratio)

    def _entry(self, key: tuple[str, str], steps: Sequence[_Difference]) -> Entry:
        kind, layer = self._kind_and_layer(*key)
        first = next((number for number, step in enumerate(steps) if step.too_large), None)
        shown = steps[-1 if first is None else first]
        ratio = 1.0 if first is None else shown.ratio
        return Entry(kind, key[1], layer, shown.difference, shown.sensitivity, shown.tolerance, ratio, first)

    def _kind_and_layer(self, kind: str, name: str) -> tuple[str, str]:
        if kind == "variable":
            kind = self._kinds.get(name, "state")
        of = self.seen.get((kind, name))
        if kind in ("gradient", "weight", "state"):
            return kind, self._owners.get(name if of is None else of.path, self.model.name)
        if kind == "log" and any(metric.name == name for metric in keras_internals.metrics_of(self.model)):
            return kind, name
        return kind, self.model.name if of is None else of.name

    @functools.cached_property
    def _kinds(self) -> dict[str, str]:
        """The kind of each variable that is a weight or belongs to the optimizer, by the variable's path."""
        weights = {variable.path: "weight" for variable in self.model.trainable_variables}
        return weights | {variable.path: "optimizer" for variable in self.groups["optimizer"]}

    @functools.cached_property
    def _owners(self) -> dict[str, str]:
        """The name of the innermost layer of each variable, by the variable's path."""
        layers = sorted(keras_internals.all_layers(self.model), key=lambda layer: -len(layer.variables))
        return {variable.path: layer.name for layer in layers for variable in layer.variables}


@dataclass(frozen=True)
class _Difference:
    difference: float
    sensitivity: float
    tolerance: float
    ratio: float  # of the size on the strategy to that on one device

    @property
    def too_large(self) -> bool:
        return not self.difference <= self.tolerance  # NaN is too large


_AFTER = ("state", "weight", "optimizer", "log")


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the largest difference; NaN equals NaN, and an infinity equals itself."""
    same = (a == b) | (np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64)))
    return float(np.max(np.where(same, 0.0, np.abs(np.where(same, 0, a) - np.where(same, 0, b))), initial=0))
