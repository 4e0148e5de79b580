"""The option `shard`: each process of a job holds and updates a part of the state of optimizers (ZeRO).

    "optimizer"    the slots are divided over the processes
    "gradients"    the same, and back-propagation waits for gradients to be sent, so that few of them are in memory

`tfdist.optimizers.sharded` makes the update.
Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UsageError
from tfdist.groups import ProcessGroup
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers
from tfdist.internals.attached import Attached
from tfdist.jobs import consensus
from tfdist.optimizers.sharded import ShardedOptimizer
from tfdist.training.job_strategy import needs_whole_state

KINDS = ("optimizer", "gradients")
LEAVE_OUT = "leave out `shard`; each process then has the whole state of the optimizer"
_sharded: Attached[ShardedOptimizer] = Attached("sharded_optimizer")


def tables(model: Any) -> list[Any]:
    """The variables of `model` whose gradients are sparse: rows are sent, and no process updates a part of them."""
    layers = keras_internals.all_layers(model)
    return [v for layer in layers if isinstance(layer, keras.layers.Embedding) for v in layer.trainable_variables]


def sharded(optimizer: Any) -> ShardedOptimizer | None:
    """The parts of `optimizer` that this process has; `None` if it has all of it."""
    return _sharded.get(optimizer)


class ShardedState:
    """The state of optimizers, of which each process has a part.

    Args:
        kind: one of `KINDS`.
        group: the processes of the job.
        peers: the same processes, which agree on what they do.
    """

    def __init__(self, kind: str, group: ProcessGroup, peers: consensus.Peers):
        self.kind = kind
        self._group, self._peers = group, peers

    def divide_all(self, model: Any, *, eager: bool) -> None:
        """Divides the optimizers of `model` that are built; with `eager` steps they are kept whole."""
        for optimizer in keras_internals.optimizers(model):
            found = sharded(optimizer)
            if eager:  # operation by operation, on whole variables
                if found is not None:
                    found.keep_whole()
            elif found is None and optimizer.built:
                self._peers.broadcast_variables(optimizer.variables)
                self.divide(model, optimizer, [])

    def divide(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        """Builds the part of `optimizer`, which updates `variables`, that this process has."""

        def meet(doing: str) -> None:
            consensus.all_gather_object(self._peers, None, doing)

        of_tables = [tuple(variable.shape) for variable in tables(model)]
        _sharded.set(optimizer, ShardedOptimizer(optimizer, variables, of_tables, self._group, meet))

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        """The context in which a step is traced as if this process had the whole state."""
        with contextlib.ExitStack() as stack:
            for one in _sharded_of(model):
                stack.enter_context(one.tracing())
            yield

    def variables_in_parts(self, model: Any) -> Mapping[int, spmd.Placed]:
        """See `Strategy.variables_in_parts`."""
        return {key: placed for one in _sharded_of(model) for key, placed in one.variables.items()}

    def keep_whole(self, model: Any, handles: Collection[int]) -> None:
        """See `Strategy.keep_whole`."""
        for one in _sharded_of(model):
            one.keep_whole(handles)

    def finalize(self, model: Any, mesh: spmd.Mesh) -> None:
        """What the optimizer of `model` does to its variables at the end of a training."""
        found = sharded(model.optimizer)
        if found is None:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        elif keras_optimizers.inner(model.optimizer).use_ema:

            def finalized() -> None:
                model.optimizer.finalize_variable_values(model.trainable_weights)

            with self.tracing(model):
                traced = tf.function(finalized, autograph=False).get_concrete_function()
            variables = found.variables
            tf.function(lambda: spmd.compute(traced, mesh, [], None, spmd.Cost(), None, variables), autograph=False)()

    @contextlib.contextmanager
    def whole(self, model: Any) -> Iterator[None]:
        """The context in which the chief has the whole state; all processes enter it."""
        with contextlib.ExitStack() as stack:
            for one in _sharded_of(model):
                stack.enter_context(one.whole())
            yield

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Raises `UsageError` for a callback that needs the whole state."""
        for callback in callbacks:
            what = needs_whole_state(callback)
            if what is not None:
                raise UsageError(
                    f"`shard` is `{self.kind}`, and {what} needs the whole state of the optimizer",
                    f"use `tfdist.callbacks.Checkpoint` in its place, or {LEAVE_OUT}",
                )


def _sharded_of(model: Any) -> list[ShardedOptimizer]:
    found = [sharded(optimizer) for optimizer in keras_internals.optimizers(model)]
    return [one for one in found if one is not None]
