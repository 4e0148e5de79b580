"""An optimizer of which each process of a job has the slots of a part of the variables, and updates that part alone.

    gradients of the replicas   -> reduce-scatter ->   this process' part of their sum
    part of the variables       -> Keras' update  ->   the same part, updated
    updated parts               -> all-gather     ->   the whole variables, in every process

An update costs each of N processes an N-th of the time and of the memory for slots, and the two exchanges together send
as many bytes as the all-reduce in their place. What the update takes from all variables together (norms that gradients
are clipped by, whether all of them are finite) is exchanged too, so that it is that of one device.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO: Memory optimizations toward training trillion parameter models,
arXiv:1910.02054, 2020; stages 1 and 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.communicators import Communicator
from tfdist.communicators.parts import Part
from tfdist.core import gradient_reduction, optimizer_layout, updated_parts
from tfdist.core.divided_optimizer import DividedOptimizer
from tfdist.core.optimizer_layout import Sharing
from tfdist.core.segments import Segments
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers
from tfdist.internals import tensorflow as tensorflow_internals

# The buffers of gradients that are in memory at the same time: one is sent while the next one is filled.
BUFFERS = 2

LEAVE_OUT = "leave out `shard`; each process then has the whole state of the optimizer"


class Exchanges(Protocol):
    """What an update needs of the replica whose step it is part of."""

    packing: gradient_reduction.Packing

    def next_name(self) -> str:
        """A name for an exchange of this step, the same in all processes."""
        ...

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """The sums of whole gradients over the processes."""
        ...


class ShardedOptimizer(DividedOptimizer):
    """The parts of one optimizer that this process has.

    Args:
        optimizer: of Keras; built or not.
        variables: that it updates, or is to be built for.
        sparse: those of them whose gradients may be sparse, which every process updates as a whole.
        communicator: of the processes.
        meet: is called with what this process is about to do, and raises an error if another one does something else.
        bounded: a graph computes gradients only as fast as they are sent, so that at most `BUFFERS` are in memory.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        sparse: Sequence[Any],
        communicator: Communicator,
        meet: Callable[[str], None],
        bounded: bool = False,
    ):
        super().__init__(optimizer, communicator, meet)
        self.variables = list(variables)
        self._bounded = bounded
        self._index = {id(variable): index for index, variable in enumerate(self.variables)}
        replicated = {id(variable) for variable in sparse}
        sharings = [_sharing(optimizer, variable, id(variable) in replicated) for variable in self.variables]
        shapes = [tuple(variable.shape) for variable in self.variables]
        self.parts = optimizer_layout.parts(shapes, sharings, communicator.rank, communicator.size)
        self._sharings = sharings
        self._require_work()
        self._values = [updated_parts.place(*pair) for pair in zip(self.variables, self.parts, strict=True)]
        self._make_slots()

    def _require_work(self) -> None:
        """Raises `UsageError` where a process would have nothing to update."""
        placed = self._sharings.count(Sharing.PLACED)
        if placed == len(self._sharings) and placed < self._communicator.size:
            raise UsageError(
                f"`{keras_optimizers.inner(self.optimizer).name}` is sharded by whole variables, and there are "
                f"{placed} for {self._communicator.size} processes",
                LEAVE_OUT,
            )

    def _make_slots(self) -> None:
        if not self.optimizer.built:
            split = [index for index, sharing in enumerate(self._sharings) if sharing is Sharing.SPLIT]
            plain = [updated_parts.local(variable) for variable in self.variables]
            for index in split:
                self._load(index)
                plain[index] = self._values[index]
            with tf.init_scope(), tensorflow_internals.without_strategy():
                keras_optimizers.build(self.optimizer, self.variables, plain)
            for index in split:
                updated_parts.release(self._values[index])
        self._divide_slots(self.variables, self.parts, LEAVE_OUT)

    def updates(self, variables: Sequence[Any]) -> bool:
        """Whether `variables` are all that the optimizer updates, in their order."""
        return [id(variable) for variable in variables] == [id(variable) for variable in self.variables]

    def apply(
        self,
        apply: Callable[[list[Any], list[Any]], None],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        replica: Exchanges,
        local: Callable[[Any], bool],
    ) -> None:
        """Updates the parts of this process, and all variables with the parts of all.

        Args:
            apply: Keras' update, as `apply(gradients, variables)`.
            gradients: of the global batch, or those that `local` tells; `None` for a variable without one.
            variables: that the gradients belong to; `None` stands for all.
            replica: whose step it is.
            local: whether a gradient is that of this process' part of the batch, to be summed here.
        """
        of = [self._index[id(variable)] for variable in (self.variables if variables is None else variables)]
        by_index = {index: one for index, one in zip(of, gradients, strict=True) if one is not None}
        self._require_dense(by_index)
        averages = keras_optimizers.inner(self.optimizer).use_ema
        touched = list(range(len(self.variables))) if averages else sorted(by_index)
        own = self._own_gradients(by_index, replica, local)
        held = [index for index in touched if self._is_held(index)]
        given = [index for index in held if index in own]
        if not given:
            raise UsageError(
                f"An update of the optimizer `{self.optimizer.name}` is of variables that other processes hold alone",
                LEAVE_OUT,
            )
        for index in held:
            self._load(index)
        with self._in_update(held, given, replica):
            apply([own[index] for index in given], [self.variables[index] for index in given])
        self._gather(touched, replica)

    def run(self, function: Callable[[list[Any]], None], replica: Exchanges) -> None:
        """Calls `function(variables)`, in which the variables are the parts of this process, and gathers them."""
        everything = list(range(len(self.variables)))
        held = [index for index in everything if self._is_held(index)]
        for index in held:
            self._load(index)
        with self._in_update(held, held, replica):
            function([self.variables[index] for index in held])
        self._gather(everything, replica)

    def _is_held(self, index: int) -> bool:
        """Whether this process updates a variable, or a part of it, which may be without elements."""
        part = self.parts[index]
        return part is None or part.is_whole or self._sharings[index] is Sharing.SPLIT

    def _require_dense(self, gradients: dict[int, Any]) -> None:
        for index, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices) and self.parts[index] is not None:
                raise UsageError(
                    f"The gradient of `{self.variables[index].path}` is sparse, and only the tables of "
                    "`keras.layers.Embedding` may have sparse gradients with `shard`",
                    LEAVE_OUT,
                )

    def _own_gradients(
        self, gradients: dict[int, Any], replica: Exchanges, local: Callable[[Any], bool]
    ) -> dict[int, Any]:
        """This process' parts of the gradients of the global batch, by the index of the variable."""
        own: dict[int, Any] = {}
        to_sum = [index for index, one in gradients.items() if self.parts[index] is None and local(one)]
        summed = dict(zip(to_sum, replica.reduce([gradients[index] for index in to_sum]), strict=True))
        to_scatter = {}
        for index, gradient in gradients.items():
            part = self.parts[index]
            if part is None:
                own[index] = summed.get(index, gradient)
            elif local(gradient):
                to_scatter[index] = gradient
            else:
                own[index] = tf.reshape(updated_parts.flat(gradient, part)[part.own], part.shape)
        received: list[tf.Tensor] = []
        for bucket in self._buckets(to_scatter, replica.packing):
            if self._bounded and len(received) >= BUFFERS:
                for gradient in bucket.values():
                    tensorflow_internals.compute_after(gradient, received[-BUFFERS])
            pieces = self._scattered(bucket, replica)
            received.append(next(iter(pieces.values())))
            own |= pieces
        return own

    def _buckets(self, tensors: dict[int, Any], packing: gradient_reduction.Packing) -> list[dict[int, Any]]:
        """`tensors` in groups that are exchanged together; those of whole variables all at once, for balance."""
        indices = list(tensors)
        size = packing.buffer_bytes if Sharing.SPLIT in self._sharings else None
        groups = gradient_reduction.buffers([tensors[index] for index in indices], size)
        return [{indices[member]: tensors[indices[member]] for member in members} for members in groups]

    def _scattered(self, gradients: dict[int, Any], replica: Exchanges) -> dict[int, Any]:
        frame = Segments([self._part(index) for index in gradients])
        buffer = frame.packed([updated_parts.flat(one, self._part(index)) for index, one in gradients.items()])
        sent = gradient_reduction.to_wire(buffer, replica.packing.wire_dtype)
        mine = self._communicator.reduce_scatter(sent, replica.next_name())
        pieces = frame.own(gradient_reduction.from_wire(mine, buffer.dtype), self._communicator.rank)
        return dict(zip(gradients, pieces, strict=True))

    def _gather(self, indices: Sequence[int], replica: Exchanges) -> None:
        """Assigns the parts of all processes to the variables."""
        shared = {i: updated_parts.local(self.variables[i]) for i in indices if self.parts[i] is not None}
        for bucket in self._buckets(shared, replica.packing):
            frame = Segments([self._part(index) for index in bucket])
            mine = [self._taken(index) for index in bucket if self._is_held(index)]
            segment = frame.packed_own(mine, next(iter(bucket.values())).dtype)
            gathered = self._communicator.all_gather(segment, replica.next_name())
            for variable, value in zip(bucket.values(), frame.wholes(gathered), strict=True):
                updated_parts.assign(variable, value)

    def _taken(self, index: int) -> tf.Tensor:
        """The updated part of a variable, flat; its memory is freed once it was sent."""
        value = self._values[index].read_value()
        updated_parts.release(self._values[index])
        return tf.reshape(value, [self._part(index).size])

    def _part(self, index: int) -> Part:
        part = self.parts[index]
        assert part is not None
        return part

    def _load(self, index: int) -> None:
        """Copies this process' part of a variable to where it is updated."""
        part = self.parts[index]
        if part is not None:
            whole = updated_parts.flat(updated_parts.local(self.variables[index]).read_value(), part)
            updated_parts.assign(self._values[index], tf.reshape(whole[part.own], part.shape))

    def _in_update(
        self, held: Sequence[int], given: Sequence[int], replica: Exchanges
    ) -> contextlib.AbstractContextManager[None]:
        clip = all_finite = None
        if keras_optimizers.clips_norms(self.optimizer):
            name = replica.next_name()

            def clip(original: Any, gradients: list[Any]) -> list[Any]:
                return self._clipped(original, gradients, given, name)

        if self._scales_loss:
            all_finite = self._all_finite(replica.next_name())
        return _together(
            tensorflow_internals.without_strategy(),
            self._communicator.around_branches(),
            keras_optimizers.updating(
                self.optimizer,
                [self.variables[index] for index in held],
                [self._values[index] for index in held],
                clip,
                all_finite,
            ),
        )

    def _clipped(
        self, original: Callable[[list[Any]], list[Any]], gradients: list[Any], given: Sequence[int], name: str
    ) -> list[Any]:
        """The gradients as Keras clips those of all processes: each is joined by one number, the norm of the rest."""
        squares: list[Any] = [tf.zeros([], tf.float32)] * len(self.variables)
        for gradient, index in zip(gradients, given, strict=True):
            if self.parts[index] is not None:
                squares[index] = tf.cast(tf.reduce_sum(tf.square(gradient)), tf.float32)
        of_all = self._communicator.all_gather(tf.stack(squares)[tf.newaxis], name)
        mine = tf.constant(np.arange(self._communicator.size) != self._communicator.rank, tf.float32)
        of_others = tf.reduce_sum(of_all * mine[:, tf.newaxis], 0)
        if keras_optimizers.inner(self.optimizer).clipnorm:
            return [
                gradient
                if self.parts[index] is None
                else _with_rest(lambda joined: original([joined])[0], gradient, tf.sqrt(of_others[index]))
                for gradient, index in zip(gradients, given, strict=True)
            ]
        rest = tf.cast(tf.sqrt(tf.reduce_sum(of_others)), gradients[0].dtype)
        return original([*gradients, rest])[:-1]

    def _write(self, values: list[Any]) -> None:
        """As its base class; all processes must call it."""
        self._meet("loads the state of an optimizer")
        super()._write(values)


def _sharing(optimizer: Any, variable: Any, is_replicated: bool) -> Sharing:
    if not hasattr(variable, "path") or not keras_internals.tf_variable(variable).dtype.is_floating:
        raise UsageError(
            f"The optimizer `{optimizer.name}` updates `{variable.name}`, which is not a Keras variable of floats",
            LEAVE_OUT,
        )
    if is_replicated:
        return Sharing.REPLICATED
    kind = type(keras_optimizers.inner(optimizer))
    if kind in keras_optimizers.BY_VARIABLE:
        return Sharing.PLACED
    if kind not in keras_optimizers.BY_ELEMENT:
        raise UsageError(
            f"`shard` is set, and it is not known how `{kind.__name__}` computes an update",
            f"use an optimizer of Keras, or {LEAVE_OUT}",
        )
    # A constraint is a function of the whole variable.
    return Sharing.SPLIT if variable.constraint is None else Sharing.PLACED


def _with_rest(clip: Callable[[Any], Any], gradient: Any, norm: tf.Tensor) -> Any:
    flat = tf.reshape(gradient, [-1])
    clipped = clip(tf.concat([flat, tf.cast(norm, flat.dtype)[tf.newaxis]], 0))
    return tf.reshape(clipped[:-1], tf.shape(gradient))


@contextlib.contextmanager
def _together(*contexts: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
