"""Steps that are drawn at random: an operation of TensorFlow's between a dense layer and what is done with its results.

    x [7, 12] -> dense layer -> an operation, drawn with its inputs and attributes -> loss, metric, assigned variables

Every stateless operation on numbers is drawn, whether it has a rule or not. What the dense layer computes is exact in
any order, so that operations that jump, as `Floor` and `Bitcast` do, see the same values on several replicas.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_library, op_def_registry

from tests.spmd.one_operation import ROWS, defaults

WIDTH = 12
_LARGE = 1e100
_ELEMENTS = 20_000
_NUMBERS = (tf.float64, tf.float32, tf.int32, tf.int64, tf.bool, tf.complex128, tf.float16, tf.uint8)
# Of the runtime, and of other machines.
_NOT_DRAWN = re.compile(
    "_|Abort|Batch$|Collective|Copy|Cudnn|Debug|Enter|Exit|FakeParam|Identity|Immutable|Infeed|LoopCond|Merge|"
    "NextIteration|ParallelConcat|Placeholder|Prelinearize|PyFunc|Ref|SparseCore|Switch|TPU|Unbatch|Xla"
)
# Operations whose kernels end the process, or never return, on some of the inputs that are drawn; `test_rules.py` has
# cases of those that have a rule.
_UNSAFE = {
    "BoostedTreesAggregateStats",
    "Conv2DBackpropFilter",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "GatherV2",
    "IRFFT",
    "IRFFT2D",
    "IRFFT3D",
    "LSTMBlockCell",
    "LSTMBlockCellGrad",
    "RFFT2D",
    "RFFT3D",
    "RandomIndexShuffle",
    "SplitV",
}


@functools.cache
def kinds() -> list[str]:
    """The types of operations that are drawn."""
    found = []
    for name in sorted(dir(tf.raw_ops)):
        definition = op_def_registry.get(name) if not name.startswith("_") else None
        if definition is not None and not _NOT_DRAWN.match(name) and _is_of_numbers(definition):
            found.append(name)
    return found


def _is_of_numbers(definition: Any) -> bool:
    if (
        definition.is_stateful
        or not definition.input_arg
        or not definition.output_arg
        or definition.deprecation.version
    ):
        return False
    if any(attribute.type in ("func", "list(func)", "tensor", "shape", "list(shape)") for attribute in definition.attr):
        return False
    dtypes = [_dtypes(definition, argument) for argument in [*definition.input_arg, *definition.output_arg]]
    return all(dtypes) and not any(argument.is_ref for argument in definition.input_arg)


def _dtypes(definition: Any, argument: Any) -> list[tf.DType]:
    """The dtypes, of those that are drawn, that an input or output can have."""
    if argument.type:
        return [tf.as_dtype(argument.type)] if tf.as_dtype(argument.type) in _NUMBERS else []
    if argument.type_list_attr:
        return list(_NUMBERS[:3])
    return _allowed(_attribute(definition, argument.type_attr))


def _attribute(definition: Any, name: str) -> Any:
    return next(one for one in definition.attr if one.name == name)


def _allowed(attribute: Any) -> list[tf.DType]:
    allowed = attribute.allowed_values.list.type
    return [one for one in _NUMBERS if not allowed or one.as_datatype_enum in allowed]


@dataclass(frozen=True)
class Input:
    """An input of a drawn operation.

    Attributes:
        shape: of the input; one that has `ROWS` examples along its first axis is made of the dense layer's results.
        dtype: of the input.
        value: of a constant; `None` for the dense layer's results.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    value: np.ndarray | None

    def of(self, hidden: tf.Tensor) -> tf.Tensor:
        """The input, given the dense layer's results `[ROWS, WIDTH]`."""
        if self.value is not None:
            return tf.constant(self.value, self.dtype)
        count = int(np.prod(self.shape[1:]))
        values = tf.tile(hidden, [1, -(-count // WIDTH)])[:, :count]
        if self.dtype.is_integer or self.dtype.is_bool:
            values = tf.round(tf.abs(values))
        elif self.dtype.is_complex:
            values = tf.complex(values, -values)
        return tf.cast(tf.reshape(values, self.shape), self.dtype)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A drawn operation.

    Attributes:
        seed: with which it was drawn.
        kind: TensorFlow's name of it.
        inputs: a list for an input that is a list of tensors.
        attributes: of it.
        ending: the number of what is done with its results.
    """

    seed: int
    kind: str
    inputs: Sequence[Input | list[Input]]
    attributes: dict[str, Any]
    ending: int

    def __str__(self) -> str:
        flat = tf.nest.flatten([list(self.inputs)])
        shapes = " ".join(f"{one.dtype.name}{list(one.shape)}{'' if one.value is None else '='}" for one in flat)
        return f"{self.seed}: {self.kind}({shapes}) {self.attributes}"

    @property
    def digits(self) -> float:
        """The relative difference that the rounding of its dtypes allows."""
        names = {one.dtype.name for one in tf.nest.flatten([list(self.inputs)])}
        names |= {one.name for one in self.attributes.values() if isinstance(one, tf.DType)}
        if names & {"float16"}:
            return 2e-2
        return 1e-9 if names <= {"float64", "complex128", "bool", "int32", "int64", "uint8"} else 5e-4

    def call(self, hidden: tf.Tensor) -> list[tf.Tensor]:
        """The results of the operation."""
        names = [argument.name for argument in op_def_registry.get(self.kind).input_arg]
        given = tf.nest.map_structure(lambda one: one.of(hidden), list(self.inputs))
        return tf.nest.flatten(
            op_def_library.apply_op(self.kind, **dict(zip(names, given, strict=True)), **self.attributes)
        )


def draws(seeds: Sequence[int]) -> Iterator[Drawn]:
    """An operation for each seed, of those that run on one device."""
    for seed in seeds:
        rng = np.random.default_rng(seed)
        while True:
            kind = kinds()[rng.integers(len(kinds()))]
            if kind in _UNSAFE:
                continue
            found = next((one for one in (_draw(seed, kind, rng) for _ in range(40)) if one and _runs(one)), None)
            if found is not None:
                yield found
                break


def _runs(drawn: Drawn) -> bool:
    """Whether an operation runs on one device, and gives the same results twice, which are not very large."""
    try:
        once, again = results(drawn), results(drawn)
        for one, other in zip(once, again, strict=True):
            if one.tobytes() != other.tobytes():  # some results have no values
                return False
            finite = np.abs(one[np.isfinite(one)]) if one.dtype.kind in "fc" else np.zeros(1)
            # Whether a sum of very large numbers is infinite, or is none, depends on its order.
            if one.size > _ELEMENTS or float(finite.max(initial=0)) > _LARGE:
                return False
        return True
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError, OverflowError):
        return False


def results(drawn: Drawn) -> list[np.ndarray]:
    """The operation's results on one device."""
    with tf.Graph().as_default() as graph:
        outputs = drawn.call(tf.constant(batch() @ kernel(drawn)))
        sizes = [output.shape.num_elements() or 0 for output in outputs]
        if any(output.dtype not in _NUMBERS for output in outputs) or max(sizes, default=0) > _ELEMENTS:
            raise ValueError("large, or of another dtype")
        with tf.compat.v1.Session(graph=graph) as session:
            values = [np.asarray(value) for value in session.run(outputs)]
    if not all(one.shape.is_compatible_with(value.shape) for one, value in zip(outputs, values, strict=True)):
        raise ValueError("of another shape than TensorFlow infers")
    return values


def kernel(drawn: Drawn) -> np.ndarray:
    """The weights of the dense layer, quarters."""
    return np.random.default_rng(drawn.seed).integers(-2, 3, (WIDTH, WIDTH)) / 4.0


def batch() -> np.ndarray:
    """Examples `[ROWS, WIDTH]`: eighths, of which sums and products are exact."""
    return np.random.default_rng(0).integers(-12, 13, (ROWS, WIDTH)) / 8.0


_SHAPES: list[tuple[int, ...]] = [(), (2,), (3,), (4,), (2, 2), (3, 3), (1, 3), (2, 3), (3, 2), (4, 4), (2, 3, 3)]
_OF_ROWS: list[tuple[int, ...]] = [
    (),
    (1,),
    (3,),
    (4,),
    (12,),
    (3, 3),
    (2, 3),
    (4, 3),
    (7,),
    (2, 2, 3),
    (4, 4, 3),
    (2, 3, 2, 2),
]


def _draw(seed: int, kind: str, rng: np.random.Generator) -> Drawn | None:
    definition = op_def_registry.get(kind)
    attributes = _drawn_attributes(definition, rng)
    if attributes is None:
        return None
    shape = (ROWS, *_OF_ROWS[rng.integers(len(_OF_ROWS))])
    suffixes = [shape[axis:] for axis in range(1, len(shape) + 1)]
    common = [*_SHAPES, *suffixes * 3][rng.integers(len(_SHAPES) + 3 * len(suffixes))]
    inputs: list[Input | list[Input]] = []
    for number, argument in enumerate(definition.input_arg):
        dtypes = _input_dtypes(argument, attributes)
        drawn = [_drawn_input(number, dtype, shape, common, rng) for dtype in dtypes]
        inputs.append(drawn if argument.number_attr or argument.type_list_attr else drawn[0])
    sharded = any(one.value is None for one in tf.nest.flatten(inputs))
    inferred = {name for one in definition.input_arg for name in (one.type_attr, one.number_attr, one.type_list_attr)}
    attributes = {name: value for name, value in attributes.items() if name not in inferred}
    return Drawn(seed, kind, inputs, attributes, int(rng.integers(4))) if sharded else None


def _drawn_attributes(definition: Any, rng: np.random.Generator) -> dict[str, Any] | None:
    counts = {argument.number_attr for argument in definition.input_arg}
    lists = {argument.type_list_attr for argument in definition.input_arg}
    known = defaults(definition.name)
    attributes: dict[str, Any] = {}
    for attribute in definition.attr:
        if attribute.type == "type":
            allowed = _allowed(attribute)
            if not allowed:
                return None
            attributes[attribute.name] = allowed[min(rng.geometric(0.5) - 1, len(allowed) - 1)]
        elif attribute.name in counts:
            attributes[attribute.name] = int(rng.integers(max(1, attribute.minimum), 4))
        elif attribute.name in lists:
            attributes[attribute.name] = [tf.float64, tf.int32]
        elif attribute.name in known and rng.random() < 0.5:
            attributes[attribute.name] = known[attribute.name]
        else:
            attributes[attribute.name] = _drawn_value(definition.name, attribute, rng)
            if attributes[attribute.name] is None:
                return None
    return attributes


def _drawn_value(kind: str, attribute: Any, rng: np.random.Generator) -> Any:
    least = max(-1, attribute.minimum) if attribute.has_minimum else -1
    values: dict[str, Callable[[], Any]] = {
        "bool": lambda: bool(rng.integers(2)),
        "int": lambda: int(rng.integers(least, max(4, least + 1))),
        "float": lambda: float(rng.integers(1, 8)) / 4,
        "list(float)": lambda: [-1.0, 0.0, 1.5],
        "list(int)": lambda: _drawn_list(attribute, defaults(kind).get(attribute.name), int(rng.integers(3))),
        "string": lambda: rng.choice(list(attribute.allowed_values.list.s) or [defaults(kind).get(attribute.name)]),
    }
    return values[attribute.type]() if attribute.type in values else defaults(kind).get(attribute.name)


def _drawn_list(attribute: Any, default: list[int] | None, side: int) -> list[int]:
    """Sides of a window, of which those of the batch and of the channels are 1; or a few axes."""
    if default:
        return [max(1, side) if 0 < axis < len(default) - 1 else one for axis, one in enumerate(default)]
    return [1, *[max(1, side)] * (attribute.minimum - 2), 1] if attribute.minimum >= 4 else [side]


def _input_dtypes(argument: Any, attributes: dict[str, Any]) -> list[tf.DType]:
    if argument.type_list_attr:
        return attributes[argument.type_list_attr]
    dtype = tf.as_dtype(argument.type) if argument.type else attributes[argument.type_attr]
    return [dtype] * (attributes[argument.number_attr] if argument.number_attr else 1)


def _drawn_input(
    number: int, dtype: tf.DType, shape: tuple[int, ...], common: tuple[int, ...], rng: np.random.Generator
) -> Input:
    """Mostly of the same shape as others; a later one is often a small constant, or a vector of lengths."""
    how = rng.random()
    if how < (0.85 if number == 0 else 0.4):
        return Input(shape, dtype, None)
    if how < (0.9 if number == 0 else 0.5):
        return Input((ROWS, *_OF_ROWS[rng.integers(len(_OF_ROWS))]), dtype, None)
    if dtype in (tf.int32, tf.int64) and how < 0.7:
        lengths = np.array(shape) if how < 0.6 else np.zeros(len(shape))
        return Input((len(shape),), dtype, lengths.astype(dtype.as_numpy_dtype))
    other = common if how < 0.9 else _SHAPES[rng.integers(len(_SHAPES))]
    values = rng.integers(0, 4, other) if dtype.is_integer or dtype.is_bool else rng.integers(-8, 9, other) / 8
    return Input(other, dtype, values.astype(dtype.as_numpy_dtype))


def step(drawn: Drawn, *, gradient: bool) -> tuple[Callable[[tf.Tensor], Any], list[tf.Variable]]:
    """A function of the batch that trains a dense layer and assigns variables, and all of its variables."""
    weights = tf.Variable(kernel(drawn))
    kept = [tf.Variable(np.zeros_like(value)) for value in results(drawn)]
    metric = tf.Variable(0.0, dtype=tf.float64)

    def function(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            outputs = drawn.call(tf.matmul(x, weights))
            terms = [_ended(drawn, _real(output), number) for number, output in enumerate(outputs)]
            loss = tf.add_n(terms)
        metric.assign_add(loss)
        for variable, output in zip(kept, outputs, strict=True):
            variable.assign(output)
        change = tape.gradient(loss, weights) if gradient else None
        if change is not None:
            weights.assign_sub(0.125 * change)
        return loss, outputs

    return function, [weights, metric, *kept]


def _real(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_complex:
        tensor = tf.math.real(tensor) + 2.0 * tf.math.imag(tensor)
    return tf.cast(tensor, tf.float64)


def _ended(drawn: Drawn, tensor: tf.Tensor, number: int) -> tf.Tensor:
    """A number that depends on all elements, and on their order."""
    places = tf.range(tf.size(tensor, tf.int64), dtype=tf.int64)
    weights = tf.reshape(tf.cos(tf.cast(places + number, tf.float64)), tf.shape(tensor))
    if drawn.ending == 0:
        return tf.reduce_sum(tensor * weights)
    if drawn.ending == 1:
        return tf.reduce_mean(tensor * weights)
    if drawn.ending == 2:
        return tf.reduce_sum(weights * tf.tanh(tensor)) + tf.reduce_max(tensor)
    return tf.reduce_mean(tf.square(tensor - tf.reduce_mean(tensor))) + tf.math.reduce_sum(tensor * weights)
