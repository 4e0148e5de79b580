"""The state of a training: variables, random states, the position in the data, and the states of callbacks.

Each is converted to entries of a checkpoint and back. No strategy's scope is needed: the copies of a distributed
variable are read and assigned one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpointing.format import Entry, Stored
from tfdist.errors import CheckpointError
from tfdist.groups import parts
from tfdist.interface import state as strategy_state
from tfdist.interface import variables as shared_variables
from tfdist.internals import keras as keras_internals
from tfdist.internals import tensorflow_variables
from tfdist.internals.keras import tf_variable
from tfdist.internals.tensorflow_variables import copies
from tfdist.jobs.consensus import Peers, all_gather_object, any_of
from tfdist.jobs.world import World

COPY_THREADS = 4
COPIED_BYTES = 1 << 24

# The attributes that Keras' callbacks keep from epoch to epoch. `on_train_begin` resets them, but a resumed run must
# end like an uninterrupted one. A user's callback has `checkpoint_state()` and `restore_checkpoint_state(state)`.
REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}


def variables(model: Any) -> dict[str, list[Any]]:
    """The variables of a compiled model, of all its optimizers and of its strategy, by group.

    The model's include its seeds; of the strategy are those that are the same in all processes.
    """
    groups = {
        "metrics": model.metrics_variables,
        "optimizer": [v for optimizer in keras_internals.optimizers(model) for v in optimizer.variables],
        "model": model.variables,
        "strategy": strategy_state.of(model).shared,
    }
    seen: set[int] = set()
    for group, members in groups.items():
        groups[group] = [v for v in members if id(v) not in seen and not seen.add(id(v))]  # type: ignore[func-returns-value]
    return groups


def snapshot(model: Any, peers: Peers) -> list[Entry]:
    """Copies of the values of all variables, on the chief; the others read and send their parts of metrics alone.

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
                entries.append(_of_all(_parts(group, variable), peers))
            elif peers.world.is_chief:
                value = _copied(tensorflow_variables.read(copies(variable)[0]))
                entries.append(Entry(group, variable.path, value))
    return entries + [_of_all(_parts("own", variable), peers) for variable in strategy_state.of(model).own]


def _parts(group: str, variable: Any) -> Entry:
    return Entry(group, variable.path, np.stack([copy.numpy() for copy in copies(variable)]), by_replica=True)


def _copied(values: np.ndarray) -> np.ndarray:
    """A copy of an array; several threads copy a large one, since one does not reach the speed of the memory."""
    copy = np.empty_like(values, order="C")
    if values.nbytes <= COPIED_BYTES:
        np.copyto(copy, values)
        return copy
    here, there = (array.reshape(-1).view(np.uint8) for array in (values, copy))
    parts = [slice(begin, begin + COPIED_BYTES) for begin in range(0, values.nbytes, COPIED_BYTES)]
    with ThreadPoolExecutor(COPY_THREADS) as threads:
        list(threads.map(lambda part: np.copyto(there[part], here[part]), parts))
    return copy


def _of_all(entry: Entry, peers: Peers) -> Entry:
    """`entry` with the parts of the replicas of all processes, each of which must call this function."""
    if peers.world.world_size == 1:
        return entry
    parts = [np.frombuffer(part, entry.value.dtype) for part in peers.exchange(entry.value.tobytes())]
    return replace(entry, value=np.concatenate([part.reshape(-1, *entry.shape) for part in parts]))


def of_this(entries: Iterable[Entry], peers: Peers) -> list[Entry]:
    """`entries` with only the parts of this process; if they do not divide over the processes, the chief has all."""
    if peers.world.world_size == 1:
        return list(entries)
    return [_of_this(part, peers.world) if part.by_replica else part for part in _in_parts(entries, peers)]


def _in_parts(entries: Iterable[Entry], peers: Peers) -> list[Entry]:
    """`entries`, where metrics without parts become one part if each process now has its own metrics."""
    return [
        replace(entry, value=entry.value[np.newaxis], by_replica=True)
        if peers.metrics_by_process and entry.group == "metrics" and not entry.by_replica
        else entry
        for entry in entries
    ]


def _of_this(entry: Entry, world: World) -> Entry:
    each, rest = divmod(len(entry.value), world.world_size)
    if not rest:
        return replace(entry, value=entry.value[world.rank * each : (world.rank + 1) * each])
    return entry if world.is_chief else replace(entry, value=np.zeros_like(entry.value))


def is_shared(entry: Entry) -> bool:
    """Whether the value in the chief is that of all processes, to which it is sent."""
    return entry.group in ("model", "optimizer", "strategy") and not entry.by_replica


def assign(model: Any, stored: Stored, entries: Iterable[Entry], groups: Sequence[str], peers: Peers) -> list:
    """Assigns `entries` of `stored` to the variables of `groups`; `first_difference` has compared them before.

    All must call it. Returns the variables that are the same in all processes: the chief alone has their values.
    """
    known = variables(model)
    by_group = {group: [entry for entry in entries if entry.group == group] for group in groups}
    pairs = [pair for group in groups for pair in zip(known[group], by_group[group], strict=True)]
    read_bytes = 0
    for variable, entry in pairs:
        if parts.part_of(variable) is not None:
            shared_variables.divide(variable, None if entry.elsewhere else entry.value, peers.broadcast)
        elif not entry.elsewhere:
            _assign(variable, entry)
            read_bytes += entry.value.nbytes
        if read_bytes >= tensorflow_variables.PIECE_BYTES:
            stored.unload()
            read_bytes = 0
    return [variable for variable, entry in pairs if is_shared(entry)]


def assign_own(model: Any, entries: Iterable[Entry], peers: Peers) -> None:
    """Gives each process the values of its own from a checkpoint; all must call it, after `assign`.

    If another number of processes wrote it, or a strategy that keeps other values, all get those of the chief.
    """
    own = strategy_state.of(model).own
    if not own:
        return
    stored = [entry for entry in entries if entry.group == "own"]
    ours = [_unnumbered(_described("own", variable, variable.path)) for variable in own]
    theirs = [_unnumbered(_described("own", entry, entry.name)) for entry in stored]
    fits = ours == theirs and all(len(entry.value) == peers.world.world_size for entry in stored)
    if all(all_gather_object(peers, fits, "restores the values that each process has of its own")):
        for variable, entry in zip(own, stored, strict=True):
            assign_all(variable, np.ascontiguousarray(entry.value[peers.world.rank]))
    else:
        shared_variables.broadcast_variables(own, peers.broadcast, peers.world.is_chief)


def first_difference(model: Any, entries: Iterable[Entry], groups: Sequence[str]) -> tuple[str, str] | None:
    """The first variable in which a checkpoint and `model` differ, as each has it; `None` if there is none."""
    known = variables(model)
    for group in groups:
        stored = [entry for entry in entries if entry.group == group]
        for index in range(max(len(stored), len(known[group]))):
            there = stored[index] if index < len(stored) else None
            here = known[group][index] if index < len(known[group]) else None
            theirs = _described(group, there, there.name) if there else None
            ours = _described(group, here, here.path) if here is not None else None
            if theirs is None or ours is None or _unnumbered(theirs) != _unnumbered(ours):
                return theirs or f"no further {group} variable", ours or f"no further {group} variable"
    return None


def metrics_are_made(model: Any) -> bool:
    """Whether the compiled losses and metrics have their variables."""
    return keras_internals.is_built(model, "test")


def without_variables(model: Any) -> str | None:
    """The first layer or optimizer without variables; the compiled optimizer is left out, as it can be built later."""
    for layer in keras_internals.layers_to_build(model):
        if not layer.built:
            return f"The layer `{layer.name}`"
    for optimizer in keras_internals.optimizers(model):
        if not optimizer.built and optimizer is not model.optimizer:
            return f"The optimizer `{optimizer.name}`"
    return None


def optimizer_class(model: Any) -> str:
    """The classes of the optimizers, such as "LossScaleOptimizer(Adam)"."""
    return ", ".join(map(_class_of, keras_internals.optimizers(model))) or _class_of(None)


def _class_of(optimizer: Any) -> str:
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return f"{name}({type(inner).__name__})" if inner is not None else name


def finite(model: Any, entries: Iterable[Entry]) -> bool:
    """Whether the trained weights in `entries` are finite; other values may be infinite on purpose, such as masks."""
    trained = {variable.path for variable in model.trainable_variables}
    weights = (e.value for e in entries if e.group == "model" and e.name in trained)
    return all(map(_is_finite, weights))


def _is_finite(values: np.ndarray) -> bool:
    # The sum takes half the time, and no array of booleans. It can be infinite where no value is.
    with np.errstate(all="ignore"):
        wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
        return bool(np.isfinite(values.sum(dtype=wide))) or bool(np.isfinite(values).all())


def data_state(data: Any, peers: Peers) -> list[Entry] | None:
    """The states of `data` (`Passes`) in each process that has its own part; `None` if one cannot be saved."""
    saved = data.feed.save()
    if any_of(peers, saved is None):
        return None
    states = peers.exchange(saved) if data.feed.own else [saved]
    return [Entry("data", f"iterator {rank}", np.frombuffer(state, np.uint8)) for rank, state in enumerate(states)]


def restore_data_state(data: Any, place: dict[str, int], entries: Iterable[Entry], peers: Peers) -> None:
    """Restores the `data_state` in `entries`, and the position `place`.

    Raises:
        CheckpointError: each process has its own part of the data, and the number of processes has changed.
    """
    states = [entry.value.tobytes() for entry in entries if entry.group == "data"]
    size = peers.world.world_size if data.feed.own else 1
    if len(states) != size and place["position"]:
        raise CheckpointError(
            f"The checkpoint was written within a pass over the data by {len(states)} processes that each had their "
            f"own part, and now there are {size}",
            "resume with as many processes, or from a checkpoint of an epoch's end",
        )
    if len(states) == size:
        data.resume(states[peers.world.rank if data.feed.own else 0], **place)


def callbacks_state(callbacks: Iterable[Any]) -> tuple[list[dict[str, Any]], list[Entry]]:
    """The states of `callbacks`: their names and states in types of JSON, and the arrays that these refer to."""
    entries: list[Entry] = []
    states = []
    for name, callback in _named(callbacks):
        if hasattr(callback, "checkpoint_state"):
            state = callback.checkpoint_state()
        else:
            state = {key: getattr(callback, key) for key in _remembered(callback) if hasattr(callback, key)}
        if state:
            states.append({"name": name, "state": _plain(state, name, entries)})
    return states, entries


def restore_callbacks_state(
    callbacks: Iterable[Any], states: Iterable[dict[str, Any]], entries: Iterable[Entry], train_seconds: float
) -> None:
    """Restores callbacks by class and order; one that the checkpoint does not have starts from the beginning."""
    arrays = [entry.value for entry in entries if entry.group == "callbacks"]
    known = {state["name"]: state["state"] for state in states}
    for name, callback in _named(callbacks):
        if hasattr(callback, "restore_train_seconds"):
            callback.restore_train_seconds(train_seconds)
        if name not in known:
            continue
        state = _whole(known[name], arrays)
        if hasattr(callback, "restore_checkpoint_state"):
            callback.restore_checkpoint_state(state)
        else:
            for key, value in state.items():
                setattr(callback, key, value)


def _has_parts(variable: Any) -> bool:
    """Whether each replica has its own part of the value, such as metrics under `MirroredStrategy`."""
    value = getattr(variable, "_value", variable)
    return (
        isinstance(value, tf.distribute.DistributedValues)
        and getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ
    )


def _assign(variable: Any, entry: Entry) -> None:
    held, parts = copies(variable), list(entry.value) if entry.by_replica else [entry.value]
    if not _has_parts(variable):
        assign_all(variable, sum(parts[1:], parts[0]))
    elif len(parts) == len(held):
        for copy, part in zip(held, parts, strict=True):
            copy.assign(part)
    elif tf_variable(variable).aggregation == tf.VariableAggregation.SUM:
        # Another number of replicas wrote it: only the sum counts.
        assign_all(variable, np.zeros_like(parts[0]))
        held[0].assign(sum(parts[1:], parts[0]))
    else:
        assign_all(variable, parts[0])


def assign_all(variable: Any, value: np.ndarray) -> None:
    """Gives all copies of a variable in this process the `value`."""
    for copy in copies(variable):
        tensorflow_variables.fill(copy, value)


def _described(group: str, thing: Any, name: str) -> str:
    dtype = keras.backend.standardize_dtype(thing.dtype)
    return f"the {group} variable `{name}` {dtype} {list(parts.whole_shape(thing))}"


def _unnumbered(text: str) -> str:
    """`text` without the numbers that Keras appends to names: they depend on what the process made before."""
    return re.sub(r"_\d+(?=[/_`])", "", text)


def _named(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """Each callback, or the one inside a wrapper, named by its class and its index among those of the class."""
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


def _remembered(callback: Any) -> list[str]:
    return [key for kind, keys in REMEMBERED.items() if isinstance(callback, kind) for key in keys]


def _plain(value: Any, owner: str, entries: list[Entry]) -> Any:
    """`value` in types of JSON; arrays are appended to `entries`."""
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, owner, entries) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, owner, entries) for key, item in value.items()}
    if isinstance(value, np.ndarray) or keras.ops.is_tensor(value):
        entries.append(Entry("callbacks", owner, np.array(keras.ops.convert_to_numpy(value))))
        return {"array": len(entries) - 1}
    raise CheckpointError(
        f"The state of the callback `{owner}` holds `{type(value).__name__}`, which a checkpoint cannot hold",
        "return numbers, strings, arrays, lists and dicts from `checkpoint_state`",
    )


def _whole(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_whole(item, arrays) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"array"}:
            return arrays[value["array"]]
        return {key: _whole(item, arrays) for key, item in value.items()}
    return value
