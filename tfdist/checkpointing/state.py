"""Converts the state of a training to checkpoint entries and back.

    variables            of the model, its metrics, its optimizers and its strategy
    untracked variables  of the model, which Keras does not save: `tf.Variable`s, and the states of generators
    callbacks            their own states, or the attributes that Keras' callbacks keep between epochs
    data                 the position in the data
    random states        of the global generators of Python, NumPy, Keras and TensorFlow

No strategy's scope is needed, since the copies of a distributed variable are read and assigned individually.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import stateful_random_ops

from tfdist.checkpointing.format import Entry, Stored
from tfdist.errors import CheckpointError
from tfdist.groups import parts
from tfdist.interface.variables import broadcast_variables, described, divide, strategy_state
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_variables, tensorflow_variables
from tfdist.internals.keras import tf_variable
from tfdist.internals.tensorflow_variables import copies
from tfdist.jobs.consensus import Alone, Peers, all_gather_object, any_of

COPY_THREADS = 4
COPIED_BYTES = 1 << 24

# The attributes that Keras' callbacks keep between epochs. `on_train_begin` resets them, but a resumed run must end
# like an uninterrupted run. Custom callbacks define `checkpoint_state()` and `restore_checkpoint_state(state)`.
REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}


def variables(model: Any) -> dict[str, list[Any]]:
    """Returns the variables of a compiled model, all its optimizers and its strategy, by group.

    The model's variables include its seeds; the strategy's variables are those with the same value in all processes.
    """
    groups = {
        "metrics": model.metrics_variables,
        "optimizer": [v for optimizer in keras_internals.optimizers(model) for v in optimizer.variables],
        "model": model.variables,
        "strategy": strategy_state(model).shared,
    }
    seen: set[int] = set()
    for group, members in groups.items():
        groups[group] = [v for v in members if id(v) not in seen and not seen.add(id(v))]  # type: ignore[func-returns-value]
    return groups


def snapshot(model: Any, peers: Peers) -> list[Entry]:
    """Copies the values of all variables on the chief; the other processes only send their parts of variables.

    All processes must call it.
    """
    by_process = ("metrics",) if peers.metrics_by_process and peers.world.world_size > 1 else ()
    entries = []
    for group, members in variables(model).items():
        for variable in members:
            if parts.part_of(variable) is not None:
                whole = Entry(group, variable.path, parts.gathered(variable, peers.exchange))
                entries += [whole] * peers.world.is_chief
            elif group in by_process or _has_parts(variable):
                entries.append(_gathered(group, variable, peers))
            elif peers.world.is_chief:
                value = _copied(tensorflow_variables.read(copies(variable)[0]))
                entries.append(Entry(group, variable.path, value))
    return entries + [_gathered("own", variable, peers) for variable in strategy_state(model).own]


def _copied(values: np.ndarray) -> np.ndarray:
    """Copies an array; a large one with several threads, since one does not use the full memory bandwidth."""
    copy = np.empty_like(values, order="C")
    if values.nbytes <= COPIED_BYTES:
        np.copyto(copy, values)
        return copy
    source, target = (array.reshape(-1).view(np.uint8) for array in (values, copy))
    pieces = [slice(begin, begin + COPIED_BYTES) for begin in range(0, values.nbytes, COPIED_BYTES)]
    with ThreadPoolExecutor(COPY_THREADS) as threads:
        list(threads.map(lambda piece: np.copyto(target[piece], source[piece]), pieces))
    return copy


def _gathered(group: str, variable: Any, peers: Peers) -> Entry:
    """Returns an entry with the values of the replicas of all processes, each of which must call this function."""
    entry = Entry(group, variable.path, np.stack([copy.numpy() for copy in copies(variable)]), by_replica=True)
    if peers.world.world_size == 1:
        return entry
    values = [np.frombuffer(message, entry.value.dtype) for message in peers.exchange(entry.value.tobytes())]
    return replace(entry, value=np.concatenate([value.reshape(-1, *entry.shape) for value in values]))


def restore(model: Any, callbacks: Iterable[Any], stored: Stored, peers: Peers, send: bool) -> None:
    """Restores the variables of `model`, the states of `callbacks` and the random states from a checkpoint.

    All processes must call it. `send` broadcasts the chief's variables to the other processes.
    """
    header, entries = stored.header, local_entries(stored.entries, peers)
    in_chief = _assign_groups(model, stored, entries, groups_to_restore(model, stored), peers)
    if send:
        state = strategy_state(model)
        peers.broadcast_variables([variable for variable in in_chief if not state.has_own(variable)])
    _assign_own(model, stored.entries, peers)
    _restore_callbacks_state(callbacks, header.callbacks, entries, header.train_seconds)
    _restore_untracked(model, entries)
    restore_random_states(entries)


def restore_weights(model: Any, stored: Stored) -> None:
    """Restores only what a model computes with, for an evaluation.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    difference = first_difference(model, stored.entries, ("model",))
    if difference is not None:
        raise CheckpointError(
            f"The checkpoint `{stored.header.path}` is of another model: it has {difference[0]}, where the model has "
            f"{difference[1]}",
            "give the evaluator the model of the training",
        )
    _assign_groups(model, stored, stored.entries, ("model",), Alone())
    _restore_untracked(model, stored.entries)


def groups_to_restore(model: Any, stored: Stored) -> tuple[str, ...]:
    """Returns the groups of variables to restore.

    A new epoch resets the metrics, so that the model may have other metrics then. The state of a strategy is restored
    if both the checkpoint and the strategy have such variables; another strategy begins without them.
    """
    known = {entry.group for entry in stored.entries}
    of_strategy = ("strategy",) if "strategy" in known and variables(model)["strategy"] else ()
    return ("model", "optimizer", *(("metrics",) if stored.header.batch else ()), *of_strategy)


def local_entries(entries: Iterable[Entry], peers: Peers) -> list[Entry]:
    """Returns `entries` with the parts of this process only.

    If the number of parts is not a multiple of the number of processes, the chief gets all parts. Metrics without parts
    become a single part if each process now has its own metrics.
    """
    if peers.world.world_size == 1:
        return list(entries)
    return [_local_entry(entry, peers) for entry in entries]


def _local_entry(entry: Entry, peers: Peers) -> Entry:
    world = peers.world
    if peers.metrics_by_process and entry.group == "metrics" and not entry.by_replica:
        entry = replace(entry, value=entry.value[np.newaxis], by_replica=True)
    if not entry.by_replica:
        return entry
    count, remainder = divmod(len(entry.value), world.world_size)
    if not remainder:
        return replace(entry, value=entry.value[world.rank * count : (world.rank + 1) * count])
    return entry if world.is_chief else replace(entry, value=np.zeros_like(entry.value))


def is_shared(entry: Entry) -> bool:
    """Whether all processes have the same value, so that the chief broadcasts it."""
    return entry.group in ("model", "optimizer", "strategy") and not entry.by_replica


def _assign_groups(model: Any, stored: Stored, entries: Iterable[Entry], groups: Sequence[str], peers: Peers) -> list:
    """Assigns `entries` of `stored` to the variables of `groups`, after `first_difference` has compared them.

    All processes must call it.

    Returns:
        The variables with the same value in all processes, which only the chief has assigned.
    """
    known = variables(model)
    by_group = {group: [entry for entry in entries if entry.group == group] for group in groups}
    pairs = [pair for group in groups for pair in zip(known[group], by_group[group], strict=True)]
    read_bytes = 0
    for variable, entry in pairs:
        if parts.part_of(variable) is not None:
            divide(variable, None if entry.elsewhere else entry.value, peers.broadcast)
        elif not entry.elsewhere:
            _assign(variable, entry)
            read_bytes += entry.value.nbytes
        if read_bytes >= tensorflow_variables.PIECE_BYTES:
            stored.unload()
            read_bytes = 0
    return [variable for variable, entry in pairs if is_shared(entry)]


def _assign_own(model: Any, entries: Iterable[Entry], peers: Peers) -> None:
    """Restores the variables that differ between processes by design; all processes must call it.

    If the checkpoint was written by another number of processes, or by a strategy with other variables, all processes
    get the chief's values.
    """
    own = strategy_state(model).own
    if not own:
        return
    stored = [entry for entry in entries if entry.group == "own"]
    in_model = [_unnumbered(_described("own", variable, variable.path)) for variable in own]
    in_checkpoint = [_unnumbered(_described("own", entry, entry.name)) for entry in stored]
    fits = in_model == in_checkpoint and all(len(entry.value) == peers.world.world_size for entry in stored)
    if all(all_gather_object(peers, fits, "restores the values that each process has of its own")):
        for variable, entry in zip(own, stored, strict=True):
            _assign_all(variable, np.ascontiguousarray(entry.value[peers.world.rank]))
    else:
        broadcast_variables(own, peers.broadcast, peers.world.is_chief)


def first_difference(model: Any, entries: Iterable[Entry], groups: Sequence[str]) -> tuple[str, str] | None:
    """Describes the first variable that differs, in the checkpoint and in `model`; `None` if none does."""
    known = variables(model)
    for group in groups:
        stored = [_described(group, entry, entry.name) for entry in entries if entry.group == group]
        expected = [_described(group, variable, variable.path) for variable in known[group]]
        missing = f"no further {group} variable"
        for pair in itertools.zip_longest(stored, expected, fillvalue=missing):
            if _unnumbered(pair[0]) != _unnumbered(pair[1]):
                return pair
    return _untracked_difference(model, entries)


def optimizer_class(model: Any) -> str:
    """Returns the classes of the optimizers, such as "LossScaleOptimizer(Adam)"."""
    return ", ".join(map(_class_of, keras_internals.optimizers(model))) or _class_of(None)


def _class_of(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return f"{name}({type(inner).__name__})" if inner is not None else name


def finite(model: Any, entries: Iterable[Entry]) -> bool:
    """Whether the trainable weights in `entries` are finite; others, such as masks, may be infinite on purpose."""
    trainable = {variable.path for variable in model.trainable_variables}
    weights = (entry.value for entry in entries if entry.group == "model" and entry.name in trainable)
    return all(map(_is_finite, weights))


def _is_finite(values: np.ndarray) -> bool:
    # The sum takes half the time and needs no array of booleans, but it can overflow although all values are finite.
    with np.errstate(all="ignore"):
        wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
        return bool(np.isfinite(values.sum(dtype=wide))) or bool(np.isfinite(values).all())


def untracked_variables(model: Any) -> list[Entry]:
    """Copies the values in this process of the variables of a model that Keras does not save.

    They are identified by their order.
    """
    untracked = _untracked(model)
    return [
        Entry("held", name, _as_array(copies(variable)[0]))
        for name, variable in zip(described(untracked), untracked, strict=True)
    ]


def _untracked_difference(model: Any, entries: Iterable[Entry]) -> tuple[str, str] | None:
    in_checkpoint = [entry.name for entry in entries if entry.group == "held"]
    in_model = described(_untracked(model))
    if not in_checkpoint or in_checkpoint == in_model:  # older checkpoints do not contain such variables
        return None
    kind = "variables of TensorFlow"
    return f"{kind} {', '.join(in_checkpoint)}", f"{kind} {', '.join(in_model) or '(none)'}"


def _restore_untracked(model: Any, entries: Iterable[Entry]) -> None:
    stored = [entry.value for entry in entries if entry.group == "held"]
    for variable, value in zip(_untracked(model) if stored else [], stored, strict=True):
        for copy in copies(variable):
            copy.assign(tf.io.parse_tensor(value.tobytes(), tf.string) if copy.dtype == tf.string else value)


def _untracked(model: Any) -> list[Any]:
    generators = keras_internals.instances_of(tf.random.Generator, model)
    variables = [*keras_internals.instances_of(tf.Variable, model), *(generator.state for generator in generators)]
    return list({id(variable): variable for variable in variables}.values())


def _as_array(variable: Any) -> np.ndarray:
    """Returns the value; strings are serialized to bytes."""
    if variable.dtype == tf.string:
        return np.frombuffer(tf.io.serialize_tensor(variable.read_value()).numpy(), np.uint8)
    return np.array(variable.numpy())


def random_states() -> list[Entry]:
    """Copies the states of the global random generators of Python, NumPy, Keras and TensorFlow.

    The state of TensorFlow's stateful operations, such as `tf.random.normal`, is part of a graph and cannot be read.
    """
    version, numbers, gauss = random.getstate()
    del version
    gauss = np.array([] if gauss is None else [gauss])
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {"python": np.array(numbers, "uint32"), "python_gauss": gauss}
    if name == "MT19937":
        states["numpy"] = np.asarray(key, "uint32")
        states["numpy_rest"] = np.array([position, has_gauss, cached], "float64")
    generator = keras_variables.generator_of_unseeded()
    if generator is not None:
        states["keras"] = copies(generator.state)[0].numpy()
    generator = getattr(stateful_random_ops, "global_generator", None)
    if generator is not None:
        states["tensorflow"] = copies(generator.state)[0].numpy()
        states["tensorflow_kind"] = np.array(generator.algorithm)
    return [Entry("random", name, value) for name, value in states.items()]


def restore_random_states(entries: Iterable[Entry]) -> None:
    """Restores the generators from the result of `random_states`."""
    states = {entry.name: entry.value for entry in entries if entry.group == "random"}
    if "keras" in states:  # before Python's generator, from which a new Keras generator draws its seed
        _assign_all(keras_variables.made_generator_of_unseeded().state, states["keras"])
    else:
        keras_variables.forget_generator_of_unseeded()
    if "tensorflow" in states:
        if getattr(stateful_random_ops, "global_generator", None) is None:
            generator = tf.random.Generator.from_state(states["tensorflow"], int(states["tensorflow_kind"]))
            tf.random.set_global_generator(generator)
        else:
            _assign_all(tf.random.get_global_generator().state, states["tensorflow"])
    if "numpy" in states:
        position, has_gauss, cached = states["numpy_rest"].tolist()
        np.random.set_state(("MT19937", states["numpy"], int(position), int(has_gauss), cached))
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))


def data_state(data: Any, peers: Peers) -> list[Entry] | None:
    """Returns the state of `data` (`DataPasses`) per process with its own part; `None` if it cannot be saved."""
    saved = data.feed.save()
    if any_of(peers, saved is None):
        return None
    states = peers.exchange(saved) if data.feed.per_process else [saved]
    return [Entry("data", f"iterator {rank}", np.frombuffer(state, np.uint8)) for rank, state in enumerate(states)]


def restore_data_state(data: Any, position: dict[str, int], entries: Iterable[Entry], peers: Peers) -> None:
    """Restores the `data_state` in `entries`, at the `position` from the header.

    Raises:
        CheckpointError: each process has its own part of the data, and the number of processes has changed.
    """
    states = [entry.value.tobytes() for entry in entries if entry.group == "data"]
    size = peers.world.world_size if data.feed.per_process else 1
    if len(states) != size and position["position"]:
        raise CheckpointError(
            f"The checkpoint was written within a pass over the data by {len(states)} processes that each had their "
            f"own part, and now there are {size}",
            "resume with the same number of processes, or from a checkpoint of an epoch's end",
        )
    if len(states) == size:
        data.resume(states[peers.world.rank if data.feed.per_process else 0], **position)


def callbacks_state(callbacks: Iterable[Any]) -> tuple[list[dict[str, Any]], list[Entry]]:
    """Returns the names and states of `callbacks` in JSON types, and the arrays to which they refer."""
    entries: list[Entry] = []
    states = []
    for name, callback in _named(callbacks):
        if hasattr(callback, "checkpoint_state"):
            state = callback.checkpoint_state()
        else:
            state = {key: getattr(callback, key) for key in _remembered(callback) if hasattr(callback, key)}
        if state:
            states.append({"name": name, "state": _to_json(state, name, entries)})
    return states, entries


def _restore_callbacks_state(
    callbacks: Iterable[Any], states: Iterable[dict[str, Any]], entries: Iterable[Entry], train_seconds: float
) -> None:
    """Restores callbacks by class and order; callbacks that are not in the checkpoint keep their initial state."""
    arrays = [entry.value for entry in entries if entry.group == "callbacks"]
    known = {state["name"]: state["state"] for state in states}
    for name, callback in _named(callbacks):
        if hasattr(callback, "restore_train_seconds"):
            callback.restore_train_seconds(train_seconds)
        if name not in known:
            continue
        state = _from_json(known[name], arrays)
        if hasattr(callback, "restore_checkpoint_state"):
            callback.restore_checkpoint_state(state)
        else:
            # No other attributes, such as the path of a file, even if a checkpoint from elsewhere has them.
            for key in _remembered(callback):
                if key in state:
                    setattr(callback, key, state[key])


def _remembered(callback: Any) -> list[str]:
    """The attributes that a callback of Keras keeps between epochs."""
    return [key for kind, keys in REMEMBERED.items() if isinstance(callback, kind) for key in keys]


def _has_parts(variable: Any) -> bool:
    """Whether each replica has its own part of the value, like metrics with `tf.distribute`."""
    value = getattr(variable, "_value", variable)
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


def _assign(variable: Any, entry: Entry) -> None:
    targets, values = copies(variable), list(entry.value) if entry.by_replica else [entry.value]
    if not _has_parts(variable):
        _assign_all(variable, sum(values[1:], values[0]))
    elif len(values) == len(targets):
        for copy, value in zip(targets, values, strict=True):
            copy.assign(value)
    elif tf_variable(variable).aggregation == tf.VariableAggregation.SUM:
        # The checkpoint was written by another number of replicas: only the sum matters.
        _assign_all(variable, np.zeros_like(values[0]))
        targets[0].assign(sum(values[1:], values[0]))
    else:
        _assign_all(variable, values[0])


def _assign_all(variable: Any, value: np.ndarray) -> None:
    for copy in copies(variable):
        tensorflow_variables.fill(copy, value)


def _described(group: str, variable: Any, name: str) -> str:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return f"the {group} variable `{name}` {dtype} {list(parts.whole_shape(variable))}"


def _unnumbered(text: str) -> str:
    """Removes the numbers that Keras appends to names, since they depend on what the process created before."""
    return re.sub(r"_\d+(?=[/_`])", "", text)


def _named(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """Names each callback, or the callback that it wraps, by its class and its index within the class."""
    counts: dict[str, int] = {}
    named = []
    for callback in callbacks:
        inner = callback
        while isinstance(getattr(inner, "callback", None), keras.callbacks.Callback):
            inner = inner.callback
        kind = type(inner).__name__
        counts[kind] = counts.get(kind, -1) + 1
        named.append((f"{kind} {counts[kind]}", inner))
    return named


def _to_json(value: Any, owner: str, entries: list[Entry]) -> Any:
    """Converts `value` to JSON types; arrays are appended to `entries`."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(item, owner, entries) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_json(item, owner, entries) for key, item in value.items()}
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        entries.append(Entry("callbacks", owner, np.array(keras.ops.convert_to_numpy(value))))
        return {"array": len(entries) - 1}
    raise CheckpointError(
        f"The state of the callback `{owner}` contains `{type(value).__name__}`, which a checkpoint cannot store",
        "return numbers, strings, arrays, lists and dicts from `checkpoint_state`",
    )


def _from_json(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, arrays) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return arrays[value["array"]]
        return {key: _from_json(item, arrays) for key, item in value.items()}
    return value
