"""The private parts of Keras' optimizers that an update in parts reads and replaces; written for Keras 3.15.1.

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

from tfdist.internals.tensorflow_variables import copies

# Optimizers that compute each element of an update from the same element of gradient, variable and slots alone. The
# others take norms, means or products over a variable.
BY_ELEMENT: tuple[type, ...] = (
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


def inner(optimizer: Any) -> Any:
    """The optimizer that updates variables: the one inside of a `LossScaleOptimizer`."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def slots_of(optimizer: Any) -> list[list[Any]]:
    """The slots of each variable that a built optimizer updates; no other variable of it has more than one element.

    Raises:
        LookupError: it has variables whose use is not known.
    """
    optimizer = inner(optimizer)
    count = len(optimizer._trainable_variables)
    lists = [
        value
        for name, value in vars(optimizer).items()
        if name not in _NO_SLOTS and isinstance(value, list) and len(value) == count and _are_slots(value)
    ]
    slots = [[one[index] for one in lists if one[index] is not None] for index in range(count)]
    known = {id(slot) for of_variable in slots for slot in of_variable}
    for variable in optimizer.variables:
        if id(variable) not in known and len(variable.shape):
            raise LookupError(variable.path)
    return slots


def _are_slots(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, backend.Variable) for value in values)


@contextlib.contextmanager
def standing_for(variables: Sequence[Any], values: Sequence[tf.Variable]) -> Iterator[None]:
    """In this context the `tf.Variable` of each of the Keras `variables` is another one, perhaps of another shape."""
    before = [(variable._value, variable._shape) for variable in variables]
    try:
        for variable, value in zip(variables, values, strict=True):
            variable._value, variable._shape = value, tuple(value.shape)
        yield
    finally:
        for variable, (value, shape) in zip(variables, before, strict=True):
            variable._value, variable._shape = value, shape


@contextlib.contextmanager
def updating(optimizer: Any, variables: Sequence[Any], values: Sequence[tf.Variable]) -> Iterator[None]:
    """In this context an update of `variables` by `optimizer` reads and writes `values` in their place.

    Its other variables are plain ones, the copy of this process, and it belongs to no `tf.distribute.Strategy`.

    Args:
        optimizer: built.
        variables: those of its Keras variables that it may update; with moving averages, it averages all of these.
        values: in the place of each of them.
    """
    updates, keys = inner(optimizer), {}
    for variable, value in zip(variables, values, strict=True):
        keys[value._unique_id] = updates._var_key(variable)
    replaced: dict[str, Any] = {"_var_key": _known_by(updates._var_key, keys)}
    if updates.use_ema:  # Keras pairs them by their order
        averages = getattr(updates, _AVERAGES)
        replaced[_AVERAGES] = [averages[updates._get_variable_index(variable)] for variable in variables]
        replaced["_trainable_variables"] = list(variables)
    own = [one for one in optimizer.variables if len(copies(one)) and one._value is not copies(one)[0]]
    with contextlib.ExitStack() as stack:
        for one in {id(optimizer): optimizer, id(updates): updates}.values():
            stack.enter_context(_replaced(one, {"_distribution_strategy": _NO_STRATEGY}))
        stack.enter_context(_replaced(updates, replaced))
        stack.enter_context(standing_for(own, [copies(one)[0] for one in own]))
        stack.enter_context(standing_for(variables, values))
        yield


_NO_STRATEGY = tf.distribute.get_strategy()


def _known_by(original: Callable[[Any], Any], keys: dict[Any, Any]) -> Callable[[Any], Any]:
    def var_key(variable: Any) -> Any:
        key = original(variable)
        return keys.get(key, key)

    return var_key


@contextlib.contextmanager
def _replaced(thing: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """In this context `thing` has these attributes, past Keras' tracking of them."""
    absent = object()
    before = {name: vars(thing).get(name, absent) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is absent:
                object.__delattr__(thing, name)
            else:
                object.__setattr__(thing, name, value)


def build(optimizer: Any, variables: Sequence[Any], values: Sequence[tf.Variable]) -> None:
    """Builds `optimizer` for Keras `variables`, with slots for `values` in the place of theirs.

    Its slots are plain variables, whatever strategy it was made in.
    """
    keys = [inner(optimizer)._var_key(variable) for variable in variables]
    with contextlib.ExitStack() as stack:
        for one in {id(optimizer): optimizer, id(inner(optimizer)): inner(optimizer)}.values():
            stack.enter_context(_replaced(one, {"_distribution_strategy": _NO_STRATEGY}))
        stack.enter_context(standing_for(variables, values))
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
