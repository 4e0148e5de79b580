"""Recomputation: what the forward pass of a step has computed is computed again when the backward pass needs it.

The step is traced as ever, and its graph is changed afterwards: operations of the backward pass that use a tensor of
the forward pass get a copy of it, which is computed from tensors that are held, once the backward pass has come to it.
Only pure operations are copied. What a step reads or changes (variables, moving averages, seeds), draws from a stateful
generator, or exchanges with other replicas happens once, and copies use its result. So losses, masks, random numbers
and gradients are those of the plain step.

Source: Chen et al., Training deep nets with sublinear memory cost, arXiv 1604.06174, 2016.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist import registry
from tfdist.errors import UsageError
from tfdist.interface.strategy import BLOCKS
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches, tensorflow_patches
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.loop.forward_pass import ForwardPass, Key, Place, Segment, key

# The length of an axis whose length is not known.
UNKNOWN_LENGTH = 32

_SCOPE = "tfdist_recomputing"
_BACKWARD = "tfdist_backward"
# Operations whose results exist before a step.
_OUT_OF_STEP = frozenset(("Const", "ReadVariableOp", "Placeholder"))
_OF_A_TAPE = "gradient_tape/"  # TensorFlow's, in front of the names of what a tape computes


class Recomputation:
    """Recomputation in the steps of one model.

    Args:
        wanted: "blocks", or the names of the layers whose outputs are held; `None` leaves steps as they are.
        model: whose steps are traced.
        examples: in the part of a replica; `None` if that varies.

    Raises:
        UsageError: the steps of the model are not traced.
        UnknownNameError: the model has no layer of that name.
    """

    def __init__(self, wanted: str | Sequence[str] | None, model: Any, examples: int | None, *, eager: bool):
        self.wanted = wanted
        self._model = model
        self._examples = examples or UNKNOWN_LENGTH
        self._outputs: dict[str, list[list[tf.Tensor]]] = {}
        if wanted is None:
            return
        if eager:
            raise UsageError(
                f"`recompute` is set, and the model `{model.name}` runs eagerly, without a graph to recompute in",
                "compile it without `run_eagerly=True`, or leave `recompute` out",
            )
        if wanted != BLOCKS:
            known = list(dict.fromkeys(layer.name for layer in keras_internals.all_layers(model) if layer is not model))
            for name in wanted:
                registry.require_known(name, f"layer of the model `{model.name}`", known)

    def marked(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`step`, whose operations are noted, and those of its gradients among them."""
        if self.wanted is None:
            return step

        def call(data: Any) -> Any:
            with tf.name_scope(_SCOPE), tensorflow_patches.computing_gradients_in(lambda: tf.name_scope(_BACKWARD)):
                return step(data)

        return call

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """The context in which a step is traced; its graph is changed at the end."""
        if self.wanted is None:
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        self._outputs.clear()
        names = () if self.wanted == BLOCKS else self.wanted
        with keras_patches.noting_outputs(names, self._note):
            yield
        self._change(graph.get_operations()[before:])

    def _note(self, name: str, outputs: Any) -> None:
        found = [one for one in tf.nest.flatten(outputs) if tf.is_symbolic_tensor(one)]
        self._outputs.setdefault(name, []).append(found)

    def _change(self, operations: Sequence[tf.Operation]) -> None:
        uses = _Uses(operations)
        changed = []
        for run in _forward_runs(operations):
            forward = ForwardPass(run, uses.forward, uses.backward, self._examples)
            if not forward.used:
                continue
            cuts = forward.blocks() if self.wanted == BLOCKS else self._cuts(forward)
            changed.append(_recompute(forward, cuts, uses))
        if not changed:
            raise UsageError(
                f"`recompute` is set, and the step of the model `{self._model.name}` computes no gradients in its own "
                "graph",
                "leave out `tf.function` around the model's call and its gradients, or leave `recompute` out",
            )

    def _cuts(self, forward: ForwardPass) -> list[int]:
        found = set()
        for name in self.wanted or ():
            calls = [forward.after(outputs) for outputs in self._outputs.get(name, ())]
            found |= {cut for cut in calls if cut is not None}
        return sorted(found)


def _is_backward(operation: tf.Operation) -> bool:
    return _OF_A_TAPE in operation.name or _BACKWARD in operation.name


def _forward_runs(operations: Sequence[tf.Operation]) -> list[list[tf.Operation]]:
    """The forward passes: operations of a step without a gradient between them, in order."""
    runs: list[list[tf.Operation]] = [[]]
    for operation in operations:
        if _SCOPE not in operation.name:
            continue
        if not _is_backward(operation):
            runs[-1].append(operation)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


class _Uses:
    """Which operations use which tensor."""

    def __init__(self, operations: Sequence[tf.Operation]):
        self.order = {operation.name: index for index, operation in enumerate(operations)}
        self.forward: dict[Key, list[tf.Operation]] = {}
        self.backward: dict[Key, list[Place]] = {}
        early = _early(operations, self.order)
        for operation in operations:
            backward = _is_backward(operation) and operation.name not in early
            if backward and operation.type in graphs.OF_SHAPE:
                continue  # runs in the forward pass, and holds no memory
            for index, tensor in enumerate(operation.inputs):
                if backward:
                    self.backward.setdefault(key(tensor), []).append((operation, index))
                else:
                    self.forward.setdefault(key(tensor), []).append(operation)
        self.effective = graphs.effective(operations)


def _early(operations: Sequence[tf.Operation], order: Mapping[str, int]) -> set[str]:
    """The names of the operations that an operation uses which was traced before them.

    To differentiate a loop, TensorFlow gives the loop of the forward pass lists to keep its values in.
    """
    found: set[str] = set()
    for operation in operations:
        waiting = [operation]
        while waiting:
            for tensor in waiting.pop().inputs:
                one = tensor.op
                if order.get(one.name, -1) > order[operation.name] and one.name not in found:
                    found.add(one.name)
                    waiting.append(one)
    return found


def _recompute(forward: ForwardPass, cuts: Sequence[int], uses: _Uses) -> int:
    """Lets the backward pass use copies; returns the number of operations that are copied."""
    segments = forward.choose(cuts).segments
    copied = {key(tensor) for segment in segments for tensor in segment.used}
    rest = [tensor for tensor in forward.used if key(tensor) not in copied and not forward.is_held(tensor)]
    finished = _names(use for tensor in rest for use in uses.backward[key(tensor)])
    count = 0
    for segment in reversed(segments):
        if not segment.used:
            continue
        places = [place for tensor in segment.used for place in uses.backward[key(tensor)]]
        _copy(forward, segment, uses, places, finished)
        finished = _names(places)
        count += len(segment.operations)
    return count


def _names(places: Any) -> dict[str, tf.Operation]:
    return {operation.name: operation for operation, _ in places}


def _copy(
    forward: ForwardPass,
    segment: Segment,
    uses: _Uses,
    places: Sequence[Place],
    earlier: Mapping[str, tf.Operation],
) -> None:
    """Copies a segment, to be computed after the backward pass has left the segment behind it."""
    order = uses.order
    using = sorted({operation.name: operation for operation, _ in places}.values(), key=lambda one: order[one.name])
    first = order[using[0].name]
    upstream = ([t.op for t in one.inputs if _is_backward(t.op) and order[t.op.name] < first] for one in using)
    begun = next(filter(None, upstream), [])
    # On CPUs TensorFlow makes one operation of a bias' gradient and its convolution's, which uses the copies.
    ended = [
        one
        for name, one in earlier.items()
        if order[name] < first and name in uses.effective and one.type != "BiasAddGrad"
    ]
    after = list({one.name: one for one in [*begun, *ended]}.values())
    barriers: dict[Key, tf.Tensor] = {}
    copies: dict[str, tf.Operation] = {}

    def begin(tensor: tf.Tensor) -> tf.Tensor:
        """A held tensor, once the backward pass has come here."""
        if key(tensor) not in barriers:
            name = f"{_OF_A_TAPE}{tensor.op.name}/held_{tensor.value_index}"
            barriers[key(tensor)] = graphs.barrier(tensor, name, after)
        return barriers[key(tensor)]

    for operation in segment.operations:
        inputs = list(operation.inputs)
        again = [copies[one.op.name].outputs[one.value_index] if one.op.name in copies else None for one in inputs]
        if any(one is not None for one in again):
            inputs = [one if copied is None else copied for one, copied in zip(inputs, again, strict=True)]
        else:
            of_step = [one for one in inputs if one.op.type not in _OUT_OF_STEP] or inputs
            inputs = [begin(one) if any(one is each for each in of_step) else one for one in inputs]
        copies[operation.name] = graphs.copy(operation, inputs, f"{_OF_A_TAPE}{operation.name}/again")
    for tensor in segment.used:
        for operation, index in uses.backward[key(tensor)]:
            graphs.set_input(operation, index, copies[tensor.op.name].outputs[tensor.value_index])
