"""The private parts of Keras' optimizers that sharded updates read and replace; written for Keras 3.15.1.

    slots_of(optimizer)                       the slots of each variable
    updating(optimizer, variables, values)    an update reads and writes other values in place of the variables'

`tests/processes/test_sharded_jobs.py` fails when Keras changes a part that this module uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

from tfdist.internals.keras import inner, with_inner
from tfdist.internals.keras_variables import backed_by
from tfdist.internals.patching import with_attributes
from tfdist.internals.tensorflow_variables import copies

# Optimizers that update each element from the same element of the gradient, the variable and the slots only. The
# others compute norms, means or products over a variable.
ELEMENTWISE: tuple[type, ...] = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
_AVERAGES = "_model_variables_moving_average"
_NO_SLOTS = ("_variables", "_trainable_variables")


def slots_of(optimizer: Any) -> list[list[Any]]:
    """The slots of each variable that a built optimizer updates; its other variables are scalars.

    Raises:
        LookupError: it has other variables that are not scalars.
    """
    optimizer = inner(optimizer)
    count = len(optimizer._trainable_variables)
    slot_lists = [
        value
        for name, value in vars(optimizer).items()
        if name not in _NO_SLOTS and isinstance(value, list) and len(value) == count
        if all(slot is None or isinstance(slot, backend.Variable) for slot in value)
    ]
    slots = [[slot_list[n] for slot_list in slot_lists if slot_list[n] is not None] for n in range(count)]
    known = {id(slot) for slots_of_variable in slots for slot in slots_of_variable}
    for variable in optimizer.variables:
        if id(variable) not in known and len(variable.shape):
            raise LookupError(variable.path)
    return slots


@contextlib.contextmanager
def updating(optimizer: Any, variables: Sequence[Any], values: Sequence[tf.Variable]) -> Iterator[None]:
    """Within this context an update of `variables` by `optimizer` reads and writes `values` in their place.

    The optimizer's other variables are plain ones, this process's copy, and it has no `tf.distribute.Strategy`.

    Args:
        optimizer: a built optimizer.
        variables: the Keras variables that it may update; with moving averages, it averages all of them.
        values: one for each of the variables.
    """
    updates = inner(optimizer)
    var_key = updates._var_key
    keys = {value._unique_id: var_key(variable) for variable, value in zip(variables, values, strict=True)}
    attributes: dict[str, Any] = {"_var_key": lambda variable: keys.get(key := var_key(variable), key)}
    if updates.use_ema:  # Keras pairs variables and averages by their order
        averages = getattr(updates, _AVERAGES)
        attributes[_AVERAGES] = [averages[updates._get_variable_index(variable)] for variable in variables]
        attributes["_trainable_variables"] = list(variables)
    mirrored = [v for v in optimizer.variables if len(copies(v)) and v._value is not copies(v)[0]]
    with (
        _without_strategy(optimizer),
        with_attributes(updates, attributes),
        backed_by(mirrored, [copies(variable)[0] for variable in mirrored]),
        backed_by(variables, values),
    ):
        yield


@contextlib.contextmanager
def _without_strategy(optimizer: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for part in with_inner(optimizer):
            stack.enter_context(with_attributes(part, {"_distribution_strategy": _NO_STRATEGY}))
        yield


_NO_STRATEGY = tf.distribute.get_strategy()


def build(optimizer: Any, variables: Sequence[Any], values: Sequence[tf.Variable]) -> None:
    """Builds `optimizer` for Keras `variables`, with slots for `values` in place of theirs.

    Its slots are plain variables, whatever strategy it was made in.
    """
    keys = [inner(optimizer)._var_key(variable) for variable in variables]
    with _without_strategy(optimizer), backed_by(variables, values):
        optimizer.build(list(variables))
    inner(optimizer)._trainable_variables_indices = {key: index for index, key in enumerate(keys)}
    if inner(optimizer) is not optimizer:
        optimizer._trainable_variables_indices = dict(inner(optimizer)._trainable_variables_indices)


def saving_with(optimizer: Any, read: Callable[[], list[Any]], write: Callable[[list[Any]], None]) -> None:
    """From now on `optimizer` saves the values of `read()`, and loads values by `write(values)`, one per variable."""

    def save_own_variables(store: Any) -> None:
        for index, value in enumerate(read()):
            store[str(index)] = value

    def load_own_variables(store: Any) -> None:
        write([store[str(index)] for index in range(len(optimizer.variables))])

    object.__setattr__(optimizer, "save_own_variables", save_own_variables)
    object.__setattr__(optimizer, "load_own_variables", load_own_variables)
