"""One stage of a model, in a process of its own: its operations run, those of other stages do not.

The model is called as a whole, so that masks, training phases and types are Keras' own. An operation of an earlier
stage returns what its process has sent, if this stage uses it; an operation of another stage returns a placeholder that
nothing depends on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.stages import crossing, placement
from tfdist.stages.crossing import Crossing
from tfdist.stages.exchange import Exchange
from tfdist.stages.plan import Plan
from tfdist.stages.schedule import Task


class Stage:
    """A stage of a model.

    Attributes:
        plan: of the model.
        number: of the stage.
        count: of all stages.
        incoming: what earlier stages send.
        outgoing: what is sent to later stages.
        adds_losses: for each stage, whether its layers may add to the loss.
        next_number: the first number of a message that no crossing has.
    """

    def __init__(self, plan: Plan, number: int):
        self.plan, self.number, self.count = plan, number, len(plan.begins)
        crossings = crossing.crossings(plan)
        self.incoming = [one for one in crossings if one.target == number]
        self.outgoing = [one for one in crossings if one.source == number]
        self.adds_losses: tuple[bool, ...] = (False,) * self.count
        self.next_number = 2 * len(crossings)

    def renewed(self) -> Stage:
        """The same stage, with the gradients that are sent now: layers may be trained that were not before."""
        stage = Stage(self.plan, self.number)
        stage.adds_losses = self.adds_losses
        return stage

    @property
    def most_ahead(self) -> int:
        """The most micro-batches that a stage computes before the first backward pass."""
        return self.count - 1

    @property
    def is_last(self) -> bool:
        """Whether it computes the loss."""
        return self.number == self.count - 1


class Pass:
    """One micro-batch on its way through a stage.

    Args:
        stage: of this process.
        exchange: with the other processes.
        micro_batch: its number.
        watch: is told the received tensors that have a gradient.

    Attributes:
        received: the tensors from earlier stages that have a gradient.
        sent: the tensors to later stages that have one.
    """

    def __init__(
        self,
        stage: Stage,
        exchange: Exchange,
        micro_batch: int,
        watch: Callable[[tf.Tensor], None] = lambda tensor: None,
    ):
        self._stage, self._exchange, self._watch = stage, exchange, watch
        self._forward, self._backward = Task("forward", micro_batch), Task("backward", micro_batch)
        self._values: dict[int, tf.Tensor] = {}  # by the `id` of the symbolic tensor
        self._call: int | None = None
        self.all_received: list[tf.Tensor] = []
        self.received: list[tuple[Crossing, tf.Tensor]] = []
        self.sent: list[tuple[Crossing, tf.Tensor]] = []

    def begin(self) -> None:
        """Called when the model begins to run: receives what earlier stages send."""
        if self._call is not None:
            raise UsageError(
                "The model is called a second time within a step, and its stages are in several processes",
                "call it once in a step, or train it in one process",
            )
        self._call = 0
        for one in self._stage.incoming:
            tensor = self._exchange.receive(one.spec, one.source, 2 * one.number, self._forward)
            self.all_received.append(tensor)
            if one.has_gradient:
                self._watch(tensor)
                self.received.append((one, tensor))
            if one.mask is not None:
                mask = self._exchange.receive(one.mask_spec, one.source, 2 * one.number + 1, self._forward)
                keras_internals.set_mask(tensor, mask)
            self._values[id(one.tensor)] = tensor

    def run(self, operation: Any, run: Callable[[], Any]) -> Any:
        """Calls `run()`, the next operation of the model, if it is of this stage."""
        calls = self._stage.plan.calls
        index = self._call
        if index is None or index >= len(calls) or calls[index].operation is not operation:
            return run()  # of another model
        self._call = index + 1
        call = calls[index]
        if self._stage.plan.stage_of(index) != self._stage.number:
            return [self._values[id(one)] if id(one) in self._values else _placeholder(one) for one in call.outputs]
        with tf.name_scope(placement.scope_of(self._stage.number, self._forward)):
            outputs = run()
        self._values.update(zip(map(id, call.outputs), keras_stages.flat(outputs), strict=True))
        return outputs

    def send(self) -> None:
        """Sends what later stages use, after the model has run."""
        for one in self._stage.outgoing:
            tensor = self._values[id(one.tensor)]
            _require_as_planned(one, tensor)
            if one.has_gradient:
                self.sent.append((one, tensor))
            self._exchange.send(tensor, one.target, 2 * one.number, self._forward)
            mask = keras_internals.mask_of(tensor)
            if mask is not None:
                self._exchange.send(mask, one.target, 2 * one.number + 1, self._forward)

    def gradients_of_sent(self) -> list[tf.Tensor]:
        """The gradients with respect to `sent`, from the stages that use them."""
        return [
            self._exchange.receive(
                tf.TensorSpec(tensor.shape, tensor.dtype), one.target, 2 * one.number, self._backward
            )
            for one, tensor in self.sent
        ]

    def send_gradients(self, gradients: list[Any]) -> None:
        """Sends the gradients with respect to `received`; `None` stands for zeros."""
        for (one, tensor), gradient in zip(self.received, gradients, strict=True):
            with tf.name_scope(placement.scope_of(self._stage.number, self._backward)):
                value = tf.zeros_like(tensor) if gradient is None else tf.convert_to_tensor(gradient)
            self._exchange.send(value, one.source, 2 * one.number, self._backward)

    def send_to_last(self, tensor: tf.Tensor) -> None:
        """Sends a scalar to the last stage."""
        number = self._stage.next_number + self._stage.number
        self._exchange.send(tensor, self._stage.count - 1, number, self._forward)

    def receive_in_last(self, source: int) -> tf.Tensor:
        """The float32 scalar that stage `source` sends to this one, the last."""
        return self._exchange.receive(
            tf.TensorSpec([], tf.float32), source, self._stage.next_number + source, self._forward
        )


def _placeholder(tensor: Any) -> tf.Tensor:
    """A tensor of the rank of a symbolic one, whose value is used nowhere."""
    return tf.zeros([1 if size is None else size for size in tensor.shape], tf.as_dtype(tensor.dtype))


def _require_as_planned(crossing: Crossing, tensor: Any) -> None:
    mask = keras_internals.mask_of(tensor) if isinstance(tensor, tf.Tensor) else None
    if not isinstance(tensor, tf.Tensor) or tensor.dtype != crossing.spec.dtype:
        found = f"`{tensor.dtype.name}`" if isinstance(tensor, tf.Tensor) else f"`{type(tensor).__name__}`"
    elif (mask is None) != (crossing.mask is None):
        found = "without a mask" if mask is None else "with a mask"
    else:
        return
    raise UsageError(
        f"The output of `{crossing.name}`, which crosses a cut between two processes, is {found} in a step, and Keras "
        "expected otherwise when the model was built",
        "cut the model elsewhere with `stages`",
    )


class _Thread(threading.local):
    at: Pass | None = None
    functional: Any = None


_thread = _Thread()
# Never left: the towers' threads would leave it in another order than they entered it.
_entered = contextlib.ExitStack()


@contextlib.contextmanager
def passing(functional: Any, one: Pass) -> Iterator[None]:
    """In this context the model whose graph is `functional` runs as the stage of `one`."""
    _install()
    before = _thread.at, _thread.functional
    _thread.at, _thread.functional = one, functional
    try:
        yield
    finally:
        _thread.at, _thread.functional = before


@functools.cache
def _install() -> None:
    _entered.enter_context(keras_stages.around_operations(_begin, _around))


def _begin(functional: Any) -> None:
    if _thread.at is not None and functional is _thread.functional:
        _thread.at.begin()


def _around(functional: Any, operation: Any, run: Callable[[], Any]) -> Any:
    if _thread.at is None or keras_stages.functional_of(operation) is not None:  # whose own operations come here too
        return run()
    return _thread.at.run(operation, run)
