"""Computes the first training step on one device too, so that a bug in the partitioner does not go unnoticed.

    1. Copy the variables that the step reads and changes.
    2. Compute the traced step on one device, on the whole batch, and restore the variables.
    3. Compute the same step on the replicas; the training continues from there.

The changes that the step made are compared by their norm. A bug, such as a sum that is counted twice, alters a change
considerably. Rounding alters it too: by 4 % in ResNet-50, where a few activations change sign (as they do on one device
if the weights are changed by one bit). Hence a difference of 25 % is allowed. A gradient that is zero except for
rounding, such as that of a bias before batch normalization, has no correct digits; so 0.1 % of the largest change of a
variable of the same kind is also allowed. If the optimizer has slots, these are compared instead of the weights, since
optimizers such as Adam turn a gradient that consists of rounding errors into a full update.

Steps are not compared if they cannot be computed twice (because they have external effects, draw from a state that is
not in a variable, or change tables), if the devices fetch their batches themselves, or if the variables take more than
256 MiB, since three copies are in memory at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import DifferenceWarning
from tfdist.groups.parts import Part
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_graphs, tensorflow_variables
from tfdist.loop.one_device_step import OneDeviceStep
from tfdist.spmd.placements import Placed, Shard

_MOST_BYTES = 1 << 28
_ALLOWED = 0.25
_OF_ITS_KIND = 1e-3  # relative to the largest change of a variable of the same kind
_NOISE = 1e-8  # allowed if one device changes nothing
_TIMES_ROUNDING = 3  # relative to the square root of the machine epsilon, for dtypes coarser than float32


@dataclass(frozen=True)
class Variable:
    """A variable that a step uses.

    Attributes:
        handle: the handle of the copy that one device uses.
        name: the name to show.
        kind: "weight", "slot", "metric" or "state".
        part: the shard of it that this process keeps in another variable; `None` if this process has the whole.
    """

    handle: tf.Tensor
    name: str
    kind: str
    part: Placed | None


@dataclass(frozen=True)
class Change:
    """The values of a variable before and after the first step.

    Attributes:
        variable: the variable.
        before: its value before the step.
        expected: its value after the step on one device.
        actual: its value after the step on the replicas.
    """

    variable: Variable
    before: np.ndarray
    expected: np.ndarray
    actual: np.ndarray

    @property
    def size(self) -> float:
        """The root mean square of the change on one device."""
        return _root_mean_square(self.expected, self.before)

    @property
    def difference(self) -> float:
        """The root mean square of the difference between the replicas and one device."""
        return _root_mean_square(self.actual, self.expected)

    @property
    def is_part_of_a_metric(self) -> bool:
        """Whether this is a metric's variable that was not zero, so that a process may have only a part of it."""
        return self.variable.kind == "metric" and bool(np.any(self.before))


class FirstStep:
    """Compares the first step of the replicas with that of one device.

    Args:
        strategy: the strategy of the replicas.
        one_device: the training step.
        epsilon: the machine epsilon of the coarsest dtype in which layers compute.
    """

    def __init__(self, strategy: Any, one_device: OneDeviceStep, epsilon: float):
        self._strategy = strategy
        self._one_device = one_device
        self._allowed = max(_ALLOWED, _TIMES_ROUNDING * epsilon**0.5)

    @contextlib.contextmanager
    def compared(self, model: Any, state: Any, batch: Any) -> Iterator[None]:
        """The context in which the replicas compute the step of a fetched batch."""
        variables = self._variables(model)
        before = self._values(variables)
        expected = self._on_one_device(variables, before, state, batch) if variables else None
        yield
        if expected is None:
            return
        actual = self._values(variables)
        changes = [Change(*values) for values in zip(variables, before, expected, actual, strict=True)]
        different = self._different(changes)
        if different:
            self._warn(different)

    def _variables(self, model: Any) -> list[Variable]:
        """Returns the variables that the step uses; empty if the step cannot be computed twice."""
        graph = self._one_device.trace().graph
        handles = tensorflow_graphs.variables_of(graph)
        size_bytes = sum(map(tensorflow_graphs.size_bytes, handles))
        if not tensorflow_graphs.can_run_twice(graph) or size_bytes > _MOST_BYTES:
            return []
        optimizer_variables = keras_internals.optimizer_variables(model)
        kinds = {
            "slot": [variable for variable in optimizer_variables if "float" in str(variable.dtype)],
            "weight": model.trainable_variables,
            "metric": model.metrics_variables,
            "state": [*model.variables, *optimizer_variables],
        }
        known: dict[int, tuple[str, str]] = {}
        with self._strategy.tracing(model):  # selects the same copies as the traced step
            for kind, members in kinds.items():
                for variable in members:
                    known.setdefault(id(tensorflow_variables.copies(variable)[0].handle), (variable.path, kind))
        parts = self._strategy.variables_in_parts(model)
        return [
            Variable(handle, *known.get(id(handle), ("a variable of your own", "state")), parts.get(id(handle)))
            for handle in handles
            if id(handle) in known or id(handle) not in parts  # each step sets other sharded ones before it reads them
        ]

    def _values(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        return [tensorflow_graphs.value(v.handle) if v.part is None else self._whole(v) for v in variables]

    def _whole(self, variable: Variable) -> np.ndarray:
        assert variable.part is not None
        part, shard = tensorflow_graphs.value(variable.part.tensors[0]), variable.part.placement
        if not isinstance(shard, Shard):
            return part
        whole_shape = tensorflow_graphs.shape(variable.handle)
        lengths, rank = tuple(shard.lengths(whole_shape[shard.axis])), self._strategy.world.rank
        parts = [np.frombuffer(message, part.dtype) for message in self._strategy.exchange(part.tobytes())]
        return Part(whole_shape, lengths, rank, shard.axis).joined(parts)

    def _on_one_device(
        self, variables: Sequence[Variable], before: Sequence[np.ndarray], state: Any, batch: Any
    ) -> list[np.ndarray] | None:
        """Returns the values after the step on one device and restores them; `None` if the batch is too large."""

        def step(state: Any, batch: Any) -> Any:
            self._one_device.mesh.compute()
            return self._one_device.trace()(self._one_device.whole_batch(state, batch))

        # TensorFlow's warning about retracing counts by code object, which all models share, unless it is wrapped.
        computed = tf.function(functools.partial(step), autograph=False)
        try:
            for variable, value in zip(variables, before, strict=True):
                if variable.part is not None:
                    tensorflow_graphs.set_value(variable.handle, value)
            # Optimizing the graph takes longer than running it once without optimization.
            with (
                tf.device(self._one_device.mesh.home),
                tensorflow_graphs.optimized(disable_meta_optimizer=True),
            ):
                computed(state, batch)
            return [tensorflow_graphs.value(variable.handle) for variable in variables]
        except tf.errors.ResourceExhaustedError:
            return None
        finally:
            for variable, value in zip(variables, before, strict=True):
                in_use = variable.part is None
                tensorflow_graphs.set_value(variable.handle, value if in_use else np.zeros(0))

    def _different(self, changes: Sequence[Change]) -> list[Change]:
        largest: dict[str, float] = {}
        for change in changes:
            largest[change.variable.kind] = max(largest.get(change.variable.kind, 0.0), change.size)
        skipped = {"weight"} if largest.get("slot") else set()
        if self._strategy.world.world_size > 1 or any(change.is_part_of_a_metric for change in changes):
            skipped.add("metric")

        def is_equal(change: Change) -> bool:
            scale = change.size + _OF_ITS_KIND * largest[change.variable.kind] + _NOISE * (1 + _largest(change.before))
            return change.difference <= self._allowed * scale

        return [change for change in changes if change.variable.kind not in skipped and not is_equal(change)]

    def _warn(self, different: Sequence[Change]) -> None:
        worst = max(different, key=lambda change: change.difference)
        unless = ", unless the processes run different programs" if self._strategy.world.world_size > 1 else ""
        warnings.warn(
            f"The first step of `{self._strategy.name}` differs from that of one device: `{worst.variable.name}` by "
            f"{worst.difference:.2g} of a change of {worst.size:.2g} (root mean square)\n\n"
            f"hint: this is a bug in tfdist{unless}: please report it with the model, and train on one device until it "
            "is fixed: `--strategy single`",
            DifferenceWarning,
            stacklevel=2,
        )


def _root_mean_square(values: np.ndarray, others: np.ndarray) -> float:
    """Returns the root mean square of the differences.

    Different values that are not finite differ infinitely, and different strings differ by 1.
    """
    if not values.size:
        return 0.0
    if values.dtype == object:
        return float(np.sqrt(np.mean(values != others)))
    with np.errstate(invalid="ignore", over="ignore"):
        differences = (_as_floats(values) - _as_floats(others)).ravel()
        total = float(np.vdot(differences, differences).real)
        if not np.isfinite(total):  # some values are very large or not finite
            values, others = (array.astype(np.complex128) for array in (values, others))
            squares = np.abs(values - others) ** 2
            same = (values == others) | (np.isnan(values) & np.isnan(others))
            total = float(np.sum(np.where(same, 0.0, np.where(np.isfinite(squares), squares, np.inf))))
    return float(np.sqrt(total / values.size))


def _as_floats(values: np.ndarray) -> np.ndarray:
    return values.astype(np.result_type(values.dtype, np.float32), copy=False)


def _largest(values: np.ndarray) -> float:
    return 0.0 if values.dtype == object else float(np.max(np.abs(_as_floats(values)), initial=0.0))
