"""The option `shard`: each process of a job stores and updates a part of the optimizer state (ZeRO).

    "optimizer"    the slots are sharded over the processes
    "gradients"    the same, and back-propagation waits until gradients are sent, so that few of them are in memory

`tfdist.optimizers.sharded` computes the update.
Source: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UsageError
from tfdist.groups import ProcessGroup
from tfdist.internals import keras as keras_internals
from tfdist.internals.patching import Attached
from tfdist.jobs import consensus
from tfdist.optimizers.sharded import ShardedOptimizer
from tfdist.training.job_strategy import needs_whole_state

KINDS = ("optimizer", "gradients")
_sharded: Attached[ShardedOptimizer] = Attached("sharded_optimizer")


def sharded(optimizer: Any) -> ShardedOptimizer | None:
    """The shards of `optimizer` in this process; `None` if the process has its whole state."""
    return _sharded.get(optimizer)


def _sharded_optimizers(model: Any) -> list[ShardedOptimizer]:
    return list(filter(None, map(sharded, keras_internals.optimizers(model))))


class ShardedState:
    """The sharded state of optimizers.

    Args:
        kind: one of `KINDS`.
        group: the processes of the job.
        peers: the same processes, which agree on what they do.
    """

    def __init__(self, kind: str, group: ProcessGroup, peers: consensus.Peers):
        self.kind = kind
        self._group, self._peers = group, peers

    def divide_all(self, model: Any, *, eager: bool) -> None:
        """Shards the optimizers of `model` that are built; with `eager` steps they get their whole state back."""
        for optimizer in keras_internals.optimizers(model):
            shards = sharded(optimizer)
            if eager:  # eager operations use whole variables
                if shards is not None:
                    shards.keep_whole()
            elif shards is None and optimizer.built:
                self._peers.broadcast_variables(optimizer.variables)
                self.divide(model, optimizer, [])

    def divide(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        """Builds this process's shards of `optimizer`, which updates `variables`."""

        def meet(action: str) -> None:
            consensus.all_gather_object(self._peers, None, action)

        # The gradients of embeddings are sparse: every process updates whole tables.
        layers = [layer for layer in keras_internals.all_layers(model) if isinstance(layer, keras.layers.Embedding)]
        table_shapes = [tuple(table.shape) for layer in layers for table in layer.trainable_variables]
        _sharded.set(optimizer, ShardedOptimizer(optimizer, variables, table_shapes, self._group, meet))

    def tracing(self, model: Any) -> AbstractContextManager[None]:
        """The context in which a step is traced as if this process had the whole state."""
        return _entered(model, ShardedOptimizer.tracing)

    def variables_in_parts(self, model: Any) -> Mapping[int, spmd.Placed]:
        """See `Strategy.variables_in_parts`."""
        return {key: placed for shards in _sharded_optimizers(model) for key, placed in shards.variables.items()}

    def keep_whole(self, model: Any, handles: Collection[int]) -> None:
        """See `Strategy.keep_whole`."""
        for shards in _sharded_optimizers(model):
            shards.keep_whole(handles)

    def finalize(self, model: Any, mesh: spmd.Mesh) -> None:
        """Does what the optimizer of `model` does to its variables at the end of training."""
        shards = sharded(model.optimizer)
        if shards is None:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        elif keras_internals.inner(model.optimizer).use_ema:

            def finalize() -> None:
                model.optimizer.finalize_variable_values(model.trainable_weights)

            with self.tracing(model):
                traced = tf.function(finalize, autograph=False).get_concrete_function()
            variables = shards.variables
            tf.function(lambda: spmd.compute(traced, mesh, [], None, spmd.Cost(), None, variables), autograph=False)()

    def whole(self, model: Any) -> AbstractContextManager[None]:
        """The context in which the chief has the whole state; all processes enter it."""
        return _entered(model, ShardedOptimizer.whole)

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Raises `UsageError` for a callback that needs the whole state."""
        for callback in callbacks:
            description = needs_whole_state(callback)
            if description is not None:
                raise UsageError(
                    f"`shard` is `{self.kind}`, and {description} needs the whole state of the optimizer",
                    "use `tfdist.callbacks.Checkpoint` in its place, or leave out `shard`; each process then has the "
                    "whole state of the optimizer",
                )


@contextlib.contextmanager
def _entered(model: Any, context: Callable[[ShardedOptimizer], AbstractContextManager[None]]) -> Iterator[None]:
    """Enters a context of each sharded optimizer of `model`."""
    with contextlib.ExitStack() as stack:
        for shards in _sharded_optimizers(model):
            stack.enter_context(context(shards))
        yield
