"""The option `shard` of the strategies of several processes: each process holds and updates a part of the optimizer.

    "optimizer"    the slots are divided over the processes
    "gradients"    the same, and back-propagation waits for gradients to be sent, so that few of them are in memory

`tfdist.optimizers.sharded` makes the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import spmd
from tfdist.errors import UnknownNameError, UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_optimizers
from tfdist.jobs import consensus
from tfdist.optimizers.sharded import ShardedOptimizer
from tfdist.training import job_strategy as collective
from tfdist.training.strategy import TrainingStrategy

KINDS = ("optimizer", "gradients")
LEAVE_OUT = "leave out `shard`; each process then has the whole state of the optimizer"
_SHARDED = "_tfdist_sharded"


def tables(model: Any) -> list[Any]:
    """The variables of `model` whose gradients are sparse: rows are sent, and no process updates a part of them."""
    layers = keras_internals.all_layers(model)
    return [v for layer in layers if isinstance(layer, keras.layers.Embedding) for v in layer.trainable_variables]


class ShardingStrategy(TrainingStrategy):
    """A strategy of several processes that can divide the state of optimizers among them.

    Args:
        shard: "optimizer" or "gradients", see this module; `None` leaves the whole state in each process.
        options: see the strategy.
    """

    group: Any  # of the processes; `None` where TensorFlow exchanges tensors by itself

    def __init__(self, *, shard: str | None = None, job_settings: Mapping[str, str] | None = None, **options: Any):
        if shard is not None and shard not in KINDS:
            raise UnknownNameError("shard", shard, KINDS)
        self._shard = shard
        super().__init__(job_settings=dict(job_settings or {}) | {"shard": str(shard)}, **options)
        if self.shard is not None and self.group is None:
            raise UsageError(
                f"`shard` is `{shard}`, and the processes exchange tensors by TensorFlow's own collectives",
                'use `communication="sockets"`, with one device per process, or the strategy `horovod`',
            )

    @property
    def shard(self) -> str | None:
        """What is divided among the processes; `None` where there is only one."""
        return self._shard if self.world.world_size > 1 else None

    def options(self) -> dict[str, Any]:
        return super().options() | {"shard": self.shard}

    def sharded(self, optimizer: Any) -> ShardedOptimizer | None:
        """The parts of `optimizer` that this process has; `None` if it has all of it."""
        found: ShardedOptimizer | None = vars(optimizer).get(_SHARDED)
        return found

    def is_divided(self, optimizer: Any) -> bool:
        return self.sharded(optimizer) is not None

    def divide_optimizers(self, model: Any) -> None:
        if self.shard is None:
            return
        for optimizer in keras_internals.optimizers(model):
            sharded = self.sharded(optimizer)
            if self.runs_eagerly(model):  # operation by operation, on whole variables
                if sharded is not None:
                    sharded.keep_whole()
            elif sharded is None and optimizer.built:
                self.broadcast_variables(optimizer.variables)
                self._divide(model, optimizer, [])

    def build_optimizer(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        if self.shard is None or self.runs_eagerly(model):
            super().build_optimizer(model, optimizer, variables)
        else:
            self._divide(model, optimizer, variables)

    def _divide(self, model: Any, optimizer: Any, variables: Sequence[Any]) -> None:
        def meet(doing: str) -> None:
            consensus.all_gather_object(self, None, doing)

        of_tables = [tuple(variable.shape) for variable in tables(model)]
        divided = ShardedOptimizer(optimizer, variables, of_tables, self.group, meet)
        # Past Keras' attribute tracking, so that it is not saved with the model.
        object.__setattr__(optimizer, _SHARDED, divided)

    def _sharded_of(self, model: Any) -> list[ShardedOptimizer]:
        found = [self.sharded(optimizer) for optimizer in keras_internals.optimizers(model)]
        return [one for one in found if one is not None]

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        with super().tracing(model), contextlib.ExitStack() as stack:
            for sharded in self._sharded_of(model):
                stack.enter_context(sharded.tracing())
            yield

    def place_of_update(self, optimizer: Any) -> Callable[[tf.Variable], tf.Variable | None]:
        sharded = None if optimizer is None else self.sharded(optimizer)
        return super().place_of_update(optimizer) if sharded is None else sharded.place

    def variables_in_parts(self, model: Any) -> Mapping[int, spmd.Placed]:
        return {key: one for sharded in self._sharded_of(model) for key, one in sharded.variables.items()}

    def keep_whole(self, model: Any, handles: Collection[int]) -> None:
        for sharded in self._sharded_of(model):
            sharded.keep_whole(handles)

    def finalize_variables(self, model: Any) -> None:
        sharded = self.sharded(model.optimizer)
        if sharded is None:
            super().finalize_variables(model)
        elif keras_optimizers.inner(model.optimizer).use_ema:
            with self.tracing(model):
                update = tf.function(lambda: super(ShardingStrategy, self).finalize_variables(model), autograph=False)
                traced = update.get_concrete_function()
            mesh, variables = self.mesh, sharded.variables
            assert mesh is not None
            tf.function(lambda: spmd.compute(traced, mesh, [], None, spmd.Cost(), None, variables), autograph=False)()

    @contextlib.contextmanager
    def whole_state(self, model: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in keras_internals.optimizers(model):
                sharded = self.sharded(optimizer)
                if sharded is not None:
                    stack.enter_context(sharded.whole())
            yield

    def verify(self, model: Any, *arguments: Any, **named: Any) -> Any:
        self._refuse_verification()
        return super().verify(model, *arguments, **named)

    def prepare(self, model: Any, *, verify: bool = False) -> Any:
        if verify:
            self._refuse_verification()
        return super().prepare(model, verify=verify)

    def _refuse_verification(self) -> None:
        if self.shard is not None:
            raise UsageError(
                f"`shard` is `{self.shard}`, and a verification compares the whole state of optimizers",
                "verify the model with the same strategy without `shard`",
            )

    def check_callbacks(self, callbacks: Iterable[Any]) -> None:
        for callback in callbacks if self.shard is not None else ():
            what = collective.needs_whole_state(callback)
            if what is not None:
                raise UsageError(
                    f"`shard` is `{self.shard}`, and {what} needs the whole state of the optimizer",
                    f"use `tfdist.callbacks.Checkpoint` in its place, or {LEAVE_OUT}",
                )
