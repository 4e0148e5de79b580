"""Variables that are made in the scope of a `tf.distribute.Strategy`, such as copies on several devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import ProcessGroup
from tfdist.groups.packing import summed
from tfdist.groups.socket_group import SocketGroup
from tfdist.interface.variables import Variables
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_routes, tensorflow_variables
from tfdist.internals import tensorflow as tensorflow_internals
from tfdist.internals.keras import tf_variable


class TensorFlowVariables(Variables):
    """The variables of a `tf.distribute.Strategy`.

    Args:
        strategy: the `tf.distribute.Strategy`.
        name: the name of tfdist's strategy, for messages.
    """

    def __init__(self, strategy: tf.distribute.Strategy, name: str):
        super().__init__()
        self.strategy = strategy
        self._name = name

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        with self.strategy.scope() as entered, tensorflow_variables.converting_to_numbers():
            yield entered

    @contextlib.contextmanager
    def tracing(self, model: Any) -> Iterator[None]:
        with tensorflow_variables.first_copies(), keras_internals.updating_on_one_device(model):
            yield

    @contextlib.contextmanager
    def calling(self, strategy: Any, model: Any) -> Iterator[None]:
        # A callback may call `model.predict`. Keras' own method fails in this scope: a replica may have no examples,
        # and the other processes would have to take part.
        is_inside = tf.distribute.get_strategy() is self.strategy and tf.distribute.in_cross_replica_context()
        outside_of_scope = tensorflow_internals.without_strategy() if is_inside else contextlib.nullcontext()
        with keras_routes.routed_to(model, strategy), outside_of_scope:
            yield

    def check(self, model: Any, is_divided: Callable[[Any], bool]) -> None:
        optimizers = keras_internals.optimizers(model)
        whole = [optimizer for optimizer in optimizers if not is_divided(optimizer)]
        variables = [*model.variables, *(v for optimizer in whole for v in optimizer.variables)]
        outside = [variable for variable in variables if not self._is_made_in_scope(variable)]
        if model.distribute_strategy is not self.strategy or outside:
            raise self._made_outside(f"variable `{outside[0].path}`" if outside else f"model `{model.name}`")
        for optimizer in optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if keras_internals.strategy_of(inner) is not self.strategy:
                raise UsageError(
                    f"The optimizer `{inner.name}` was made outside the scope of the strategy `{self._name}`",
                    "make the optimizer, or pass its name to `compile`, inside `with strategy.scope():`",
                )

    def _made_outside(self, what: str) -> UsageError:
        return UsageError(
            f"The {what} was made outside the scope of the strategy `{self._name}`",
            "make and compile the model, and make its optimizer and metrics, inside `with strategy.scope():`",
        )

    def _is_made_in_scope(self, variable: Any) -> bool:
        return self.strategy.extended.variable_created_in_scope(variable.value)


class WorkerVariables(TensorFlowVariables):
    """The variables of `tf.distribute.MultiWorkerMirroredStrategy`."""

    def sum_metrics(self, group: ProcessGroup, variables: Sequence[Any], name: str) -> list[tf.Tensor]:
        outside = [variable for variable in variables if not self._is_made_in_scope(variable)]
        if outside:  # a plain variable, which does not tell whether its value is the whole state or this process's part
            raise self._made_outside(f"variable `{outside[0].path}` of a metric")
        if not isinstance(group, SocketGroup):
            return super().sum_metrics(group, variables, name)  # reading a sum of copies adds them
        is_sum, local = tensorflow_variables.is_sum_of_copies, self.strategy.experimental_local_results
        tf_variables = list(map(tf_variable, variables))
        parts = [tf.convert_to_tensor(local(variable)[0]) for variable in tf_variables if is_sum(variable)]
        sums = iter(summed(group, parts, name))
        return [next(sums) if is_sum(variable) else tf.convert_to_tensor(variable) for variable in tf_variables]
