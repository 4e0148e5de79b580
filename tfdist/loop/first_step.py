"""The first step of a training, computed on one device too, so that a fault of the partitioner is not silent.

    the state       of the variables that a step reads and changes is copied
    one device      computes the traced step on the whole batch; the state is put back
    the replicas    compute the same step, and the training goes on from there

What the step changed is compared by its norm. A fault, such as a sum that is counted twice, makes of a change another
one; rounding moves it too, by four hundredths in ResNet-50, where a few activations are on the other side of zero (the
same happens on one device whose weights are moved by one bit). So a quarter is allowed. A gradient that is zero but
for rounding, as that of a bias before a batch normalization, has no digits that are right: a thousandth of the largest
change of a variable of the same kind is allowed, too. Weights are compared where the optimizer has no slots, and else
by the slots: rules such as Adam's make a whole update of a gradient that rounding made.

Not compared are steps that cannot be computed twice, since they have effects outside, draw from a state that is not in
a variable, or change tables; steps on batches that the devices fetch themselves; and variables of more than 256 MiB,
of which three copies are in memory meanwhile.
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
from tfdist.internals import tensorflow_functions, tensorflow_variables
from tfdist.loop.one_device_step import OneDeviceStep
from tfdist.spmd.placements import Placed, Shard

_MOST_BYTES = 1 << 28
_ALLOWED = 0.25
_OF_ITS_KIND = 1e-3
_NOISE = 1e-8  # where one device changes nothing
_TIMES_ROUNDING = 3  # the square root of the machine epsilon of a type with fewer digits than float32


@dataclass(frozen=True)
class Variable:
    """A variable that a step uses.

    Attributes:
        handle: of the copy that one device uses.
        name: for people.
        kind: "weight", "slot", "metric" or "state".
        part: of it that this process has in another variable; `None` if it has the whole.
    """

    handle: tf.Tensor
    name: str
    kind: str
    part: Placed | None


@dataclass(frozen=True)
class Change:
    """What a step made of a variable.

    Attributes:
        variable: the variable.
        before: its value before the step.
        expected: after it, on one device.
        found: after it, on the replicas.
    """

    variable: Variable
    before: np.ndarray
    expected: np.ndarray
    found: np.ndarray

    @property
    def size(self) -> float:
        """The root mean square of what one device changes."""
        return _root_mean_square(self.expected, self.before)

    @property
    def difference(self) -> float:
        """The root mean square of what the replicas make otherwise."""
        return _root_mean_square(self.found, self.expected)

    @property
    def is_part_of_a_metric(self) -> bool:
        """Whether the state of a metric was not zero, so that a process may have a part of it."""
        return self.variable.kind == "metric" and bool(np.any(self.before))


class FirstStep:
    """Compares the first step of the replicas with that of one device.

    Args:
        strategy: whose replicas they are.
        one_device: the step, of a training.
        epsilon: the machine epsilon of the coarsest type that layers compute in.
    """

    def __init__(self, strategy: Any, one_device: OneDeviceStep, epsilon: float):
        self._strategy = strategy
        self._one_device = one_device
        self._allowed = max(_ALLOWED, _TIMES_ROUNDING * epsilon**0.5)

    @contextlib.contextmanager
    def compared(self, model: Any, state: Any, batch: Any) -> Iterator[None]:
        """The context in which the replicas compute the step of a batch that was fetched."""
        variables = self._variables(model)
        before = self._values(variables)
        expected = self._on_one_device(variables, before, state, batch) if variables else None
        yield
        if expected is None:
            return
        changes = [Change(*one) for one in zip(variables, before, expected, self._values(variables), strict=True)]
        different = self._different(changes)
        if different:
            self._say(different)

    def _variables(self, model: Any) -> list[Variable]:
        """The variables that the step uses; none if it is not to be computed twice."""
        graph = self._one_device.trace().graph
        handles = tensorflow_functions.variables_of(graph)
        size_bytes = sum(map(tensorflow_functions.size_bytes, handles))
        if not tensorflow_functions.can_run_twice(graph) or size_bytes > _MOST_BYTES:
            return []
        optimizers = keras_internals.optimizers(model)
        kinds = {
            "slot": [one for optimizer in optimizers for one in optimizer.variables if "float" in str(one.dtype)],
            "weight": model.trainable_variables,
            "metric": model.metrics_variables,
            "state": [*model.variables, *(one for optimizer in optimizers for one in optimizer.variables)],
        }
        known: dict[int, tuple[str, str]] = {}
        with self._strategy.tracing(model):  # which knows variables as the traced step does
            for kind, members in kinds.items():
                for one in members:
                    known.setdefault(id(tensorflow_variables.copies(one)[0].handle), (one.path, kind))
        parts = self._strategy.variables_in_parts(model)
        return [
            Variable(one, *known.get(id(one), ("a variable of your own", "state")), parts.get(id(one)))
            for one in handles
            if id(one) in known or id(one) not in parts  # others in parts are set in each step before they are read
        ]

    def _values(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        return [tensorflow_functions.value(one.handle) if one.part is None else self._whole(one) for one in variables]

    def _whole(self, variable: Variable) -> np.ndarray:
        """The value of a variable of which each process has a part."""
        assert variable.part is not None
        own, shard = tensorflow_functions.value(variable.part.tensors[0]), variable.part.placement
        if not isinstance(shard, Shard):
            return own
        whole_shape = tensorflow_functions.shape(variable.handle)
        lengths, rank = tuple(shard.lengths(whole_shape[shard.axis])), self._strategy.world.rank
        of_all = self._strategy.exchange(own.tobytes())
        parts = [np.frombuffer(one, own.dtype) for one in of_all]
        return Part(whole_shape, lengths, rank, shard.axis).joined(parts)

    def _on_one_device(
        self, variables: Sequence[Variable], before: Sequence[np.ndarray], state: Any, batch: Any
    ) -> list[np.ndarray] | None:
        """The values after the step of one device, which are put back; `None` if the batch is too large for it."""

        def step(state: Any, batch: Any) -> Any:
            self._one_device.mesh.compute()
            return self._one_device.trace()(self._one_device.whole_batch(state, batch))

        # TensorFlow warns of retracing by a function's code, which all trainings share, unless it is wrapped.
        computed = tf.function(functools.partial(step), autograph=False)
        try:
            for variable, value in zip(variables, before, strict=True):
                if variable.part is not None:
                    tensorflow_functions.set_value(variable.handle, value)
            # Optimizing the graph takes longer than running it as it is, once.
            with (
                tf.device(self._one_device.mesh.home),
                tensorflow_functions.optimized(disable_meta_optimizer=True),
            ):
                computed(state, batch)
            return [tensorflow_functions.value(variable.handle) for variable in variables]
        except tf.errors.ResourceExhaustedError:
            return None
        finally:
            for variable, value in zip(variables, before, strict=True):
                in_use = variable.part is None
                tensorflow_functions.set_value(variable.handle, value if in_use else np.zeros(0))

    def _different(self, changes: Sequence[Change]) -> list[Change]:
        largest: dict[str, float] = {}
        for one in changes:
            largest[one.variable.kind] = max(largest.get(one.variable.kind, 0.0), one.size)
        left_out = {"weight"} if largest.get("slot") else set()
        if self._strategy.world.world_size > 1 or any(one.is_part_of_a_metric for one in changes):
            left_out.add("metric")

        def is_equal(one: Change) -> bool:
            moved = one.size + _OF_ITS_KIND * largest[one.variable.kind] + _NOISE * (1 + _largest(one.before))
            return one.difference <= self._allowed * moved

        return [one for one in changes if one.variable.kind not in left_out and not is_equal(one)]

    def _say(self, different: Sequence[Change]) -> None:
        most = max(different, key=lambda one: one.difference)
        warnings.warn(
            f"The first step of `{self._strategy.name}` differs from that of one device: `{most.variable.name}` by "
            f"{most.difference:.2g} of a change of {most.size:.2g} (root mean square)\n\n"
            "hint: this is a fault of tfdist: please report it with the model, and train on one device until it is "
            "mended: `--strategy single`",
            DifferenceWarning,
            stacklevel=2,
        )


def _root_mean_square(values: np.ndarray, others: np.ndarray) -> float:
    """That of the differences; what is not finite counts as different where it is another one.

    Strings that are not equal differ by 1.
    """
    if not values.size:
        return 0.0
    if values.dtype == object:
        return float(np.sqrt(np.mean(values != others)))
    with np.errstate(invalid="ignore", over="ignore"):
        differences = (_as_floats(values) - _as_floats(others)).ravel()
        total = float(np.vdot(differences, differences).real)
        if not np.isfinite(total):  # of large numbers, or of numbers that are not finite themselves
            both, other = (np.asarray(one).astype(np.complex128) for one in (values, others))
            squares = np.abs(both - other) ** 2
            same = (both == other) | (np.isnan(both) & np.isnan(other))
            total = float(np.sum(np.where(same, 0.0, np.where(np.isfinite(squares), squares, np.inf))))
    return float(np.sqrt(total / values.size))


def _as_floats(values: np.ndarray) -> np.ndarray:
    return values.astype(np.result_type(values.dtype, np.float32), copy=False)


def _largest(values: np.ndarray) -> float:
    return 0.0 if values.dtype == object else float(np.max(np.abs(_as_floats(values)), initial=0.0))
