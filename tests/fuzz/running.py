"""Trains a case under stock Keras on one device and under a strategy, and says in what they differ.

What counts as a difference follows from what one device itself makes of a rounding: where a contestant is farther from
stock Keras than `ROUNDING`, stock Keras is trained again from initial weights that were moved by one unit in the last
place, several times, and the contestant may be some times as far away as these are from each other.
"""

import dataclasses
import functools

import keras
import numpy as np
import tensorflow as tf

from tests.contract.comparison import STOCK, start
from tests.fuzz import pieces
from tests.fuzz.steps import OwnStep

ROUNDING = 2e-5
NUDGES = 4
# How many times as far as the farthest nudged training a contestant may be: it rounds at every step, they did once.
REACH = 20.0
# A case that a rounding moves by more than this shows nothing.
CHAOTIC = 1e-2
FEW = {"batch_size": 4, "verbose": 0}


class InvalidError(Exception):
    """A case that stock Keras itself cannot train."""


class ChaoticError(Exception):
    """A case in which one device does not repeat itself to rounding."""


def difference(case, contestant):
    """What differs under `contestant`, a (name, replicas) pair, as a sentence; "" where nothing does.

    Raises:
        InvalidError: stock Keras raises.
        ChaoticError: one device is no measure.
        Exception: whatever the contestant raises.
    """
    expected = reference(case)
    found = train(case, contestant)
    reach = {}
    for seed in range(1, NUDGES + 1):
        if not farther(found, expected, reach):
            return ""
        nudged = distances(train(case, STOCK, nudge=seed), expected)
        reach = {where: max(reach.get(where, 0.0), distance) for where, distance in nudged.items()}
        if max(reach.values()) > CHAOTIC:
            raise ChaoticError
    return "; ".join(farther(found, expected, reach))


@functools.lru_cache(maxsize=8)
def reference(case):
    """What stock Keras makes of `case`."""
    try:
        return train(case, STOCK)
    except Exception as error:
        raise InvalidError(f"{type(error).__name__}: {error}") from error


def smallest(case, fails):
    """A case with as much as possible of the simplest `Case` that `fails(case)` is still true of."""
    simplest = type(case)()
    for smaller in _smaller(case, simplest):
        if fails(smaller):
            return smallest(smaller, fails)
    return case


def _smaller(case, simplest):
    """Cases with one thing less, those with much less first."""
    for field in dataclasses.fields(case):
        value, simple = getattr(case, field.name), getattr(simplest, field.name)
        if value != simple:
            yield dataclasses.replace(case, **{field.name: simple})
        if isinstance(value, tuple) and len(value) > 1:
            for index in range(len(value)):
                yield dataclasses.replace(case, **{field.name: value[:index] + value[index + 1 :]})


def farther(found, expected, reach):
    """Where `found` is farther from `expected` than a rounding and `reach`, each with its distance."""
    return [
        f"{where} by {distance:.2g}, where a rounding moves one device by {reach.get(where, 0.0):.2g}"
        for where, distance in distances(found, expected).items()
        if not distance <= ROUNDING + REACH * reach.get(where, 0.0)
    ]


def distances(found, expected):
    """The largest distance of each part of two trainings, relative where numbers are above 1."""
    if list(found) != list(expected):
        return {f"what there is ({sorted(set(found) ^ set(expected))})": float("inf")}
    return {where: _distance(found[where], expected[where]) for where in expected}


def _distance(found, expected):
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    if found.shape != expected.shape:
        return float("inf")
    # Of a training that has overflown, kernels say inf or nan: the largest of the two is either.
    alike = (found == expected) | ~(np.isfinite(found) | np.isfinite(expected))
    with np.errstate(invalid="ignore"):
        apart = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    return float(np.max(np.where(alike, 0.0, np.where(np.isnan(apart), np.inf, apart)), initial=0.0))


def train(case, contestant, nudge=0):
    """What a training of two epochs leaves: numbers by where they were found."""
    keras.backend.clear_session(free_memory=False)  # or Keras would count the names of metrics on: auc, auc_1, ...
    strategy = start(contestant)
    with strategy.scope():
        model = build(case)
    if nudge:
        move_by_one_unit(model, nudge)
    x, y, weight = arrays(case, case.examples, seed=case.seed)
    unseen = arrays(case, case.unseen, seed=case.seed + 1)
    callbacks = [pieces.CALLBACKS[name](x) for name in case.callbacks]
    fit = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
    if case.class_weights:
        fit["class_weight"] = {index: 0.5 + index for index in range(pieces.CLASSES)}
    if case.validation == "arrays":
        fit |= {"validation_data": tuple(one for one in unseen if one is not None), "validation_batch_size": 3}
    elif case.validation == "dataset":
        fit["validation_data"] = dataset(unseen, 3)
    elif case.validation == "split":
        fit["validation_split"] = 0.25
    history = strategy.fit(model, **given(case, x, y, weight), **fit).history
    found = {f"history[{name!r}]": values for name, values in history.items()}
    for callback in callbacks:
        for batch, logs in enumerate(getattr(callback, "kept", ())):
            found |= {f"logs of batch {batch}[{name!r}]": value for name, value in logs.items()}
    found |= {f"weights[{i}, {v.name}]": array(v) for i, v in enumerate(model.variables) if _is_number(v)}
    for name in ("optimizer", "second"):
        optimizer = getattr(model, name, None)
        if optimizer is not None:
            found |= {f"{name}[{index}]": array(variable) for index, variable in enumerate(optimizer.variables)}
    if case.afterwards == "evaluate":
        scores = strategy.evaluate(model, *unseen[:2], sample_weight=unseen[2], **FEW, return_dict=True)
        found |= {f"scores[{name!r}]": value for name, value in scores.items()}
    elif case.afterwards == "predict":
        predictions = strategy.predict(model, unseen[0], **FEW)
        found |= {f"predictions[{i}]": value for i, value in enumerate(keras.tree.flatten(predictions))}
    return found


def _is_number(variable):
    return variable.dtype != "string" and "seed" not in variable.name


def array(variable):
    return keras.ops.convert_to_numpy(variable)


def move_by_one_unit(model, seed):
    """Moves each initial weight but zeros, and the optimizer's rates of decay, by one unit in the last place."""
    rng = np.random.default_rng(seed)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    for name in sorted({"beta_1", "beta_2", "rho"} & set(vars(optimizer))):  # 1 - beta has few digits left
        decay = np.float32(getattr(optimizer, name))
        setattr(optimizer, name, float(np.nextafter(decay, np.float32(rng.choice([-1.0, 2.0])))))
    for variable in model.trainable_variables:
        value = array(variable)
        away = np.where(rng.random(value.shape) < 0.5, -np.inf, np.inf).astype(value.dtype)
        # A zero stays one, since its sign would decide where an L1 penalty pushes.
        variable.assign(np.where(value == 0, value, np.nextafter(value, away)))


def build(case):
    """The compiled model, with its optimizers built (see `drawing.py`)."""
    net = network(case)
    model = net
    if case.step or case.subclassed:
        second = keras.optimizers.Adam(0.02, epsilon=1e-3) if "apply second" in case.step else None
        model = OwnStep(net, case.step, second) if case.step else Subclassed(net)
        if second is not None:
            second.build(net.trainable_variables[-2:])
        model(sample(case))
    optimizer = pieces.OPTIMIZERS[case.optimizer](**_options(case))
    if case.scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=2)
    optimizer.build(net.trainable_variables)
    losses, metrics = pieces.LOSSES[case.target][case.loss], [_metric(case, name) for name in case.metrics]
    loss = losses(**{"reduction": case.reduction} if case.loss not in pieces.WITHOUT_REDUCTION else {})
    weighted = case.sample_weights and case.weighted_metrics
    if case.outputs == 2:
        loss, metrics = {"first": loss, "second": "mse"}, {"first": metrics, "second": ["mae"]}
    model.compile(
        optimizer,
        loss,
        loss_weights={"first": 1.0, "second": 0.3} if case.outputs == 2 else None,
        metrics=None if weighted else metrics,
        weighted_metrics=metrics if weighted else None,
        run_eagerly=case.eager,
        jit_compile=False,
        steps_per_execution=case.steps_per_execution,
    )
    return model


class Subclassed(keras.Model):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def call(self, x, training=False):
        return self.net(x, training=training)


def _options(case):
    return functools.reduce(lambda options, name: options | pieces.OPTIONS[name](), case.options, {})


def _metric(case, name):
    return (pieces.METRICS_OF_ANY | pieces.METRICS[case.target])[name]()


def network(case):
    """The layers of `case`, in its form; not compiled."""
    shape, dtype, _ = pieces.INPUTS[case.inputs]
    if case.form == "sequential":
        return keras.Sequential([keras.Input(shape, dtype=dtype), *stack(case), *ending(case)])
    if case.form in ("two inputs", "shared"):
        inputs = {name: keras.Input(shape, dtype=dtype, name=name) for name in ("left", "right")}
        chains = {"left": stack(case)}
        chains["right"] = chains["left"] if case.form == "shared" else stack(case)
        x = keras.layers.Concatenate()([through(chains[name], inputs[name]) for name in inputs])
    else:
        inputs = keras.Input(shape, dtype=dtype)
        chain = stack(case)
        if case.form == "nested":
            chain = [keras.Sequential([keras.Input(shape, dtype=dtype), *chain])] if chain else []
        x = through(chain, inputs)
    outputs = through(ending(case), x)
    if case.outputs == 2:
        tail = [keras.layers.Flatten()] if len(x.shape) > 2 else []
        outputs = {"first": outputs, "second": through([*tail, keras.layers.Dense(2)], x)}
    return keras.Model(inputs, outputs)


def stack(case):
    return [pieces.LAYERS[name].make() for name in case.layers]


def ending(case):
    _, width, activation = pieces.TARGETS[case.target]
    flat = [keras.layers.Flatten()] if case.flattened else []
    return [*flat, keras.layers.Dense(width, activation=activation)]


def through(chain, x):
    return functools.reduce(lambda x, layer: layer(x), chain, x)


def arrays(case, examples, seed):
    """Inputs, targets and sample weights, each as `fit` takes it."""
    rng = np.random.default_rng(seed)
    draw_x, draw_y = pieces.INPUTS[case.inputs][2], pieces.TARGETS[case.target][0]
    x, y, weight = draw_x(rng, examples), draw_y(rng, examples), None
    if case.form in ("two inputs", "shared"):
        x = {"left": x, "right": draw_x(rng, examples)}
    if case.sample_weights:
        weight = rng.choice([0.0, 0.5, 1.0, 1.7], examples).astype("float32")
    if case.outputs == 2:
        y = {"first": y, "second": rng.normal(size=(examples, 2)).astype("float32")}
        weight = None if weight is None else {"first": weight, "second": weight[::-1].copy()}
    return x, y, weight


def sample(case):
    x = arrays(case, 2, seed=0)[0]
    return keras.tree.map_structure(tf.convert_to_tensor, x)


def given(case, x, y, weight):
    """The data of `case` as arguments of `fit`."""
    parts = (x, y, weight)
    batches = -(-case.examples // case.batch_size)
    if case.data == "arrays":
        return {"x": x, "y": y, "sample_weight": weight, "batch_size": case.batch_size, "shuffle": False}
    if case.data == "dataset":
        return {"x": dataset(parts, case.batch_size)}
    if case.data == "dataset repeated":
        return {"x": dataset(parts, case.batch_size).repeat(), "steps_per_epoch": batches}
    if case.data == "dataset of unknown length":
        endless_batches = dataset(parts, case.batch_size).repeat().filter(lambda *_: True)
        return {"x": endless_batches, "steps_per_epoch": batches}
    if case.data == "generator":
        return {"x": endless(case, parts, batches), "steps_per_epoch": batches}
    return {"x": PyBatches(case, parts, batches), "shuffle": False}


def present(parts):
    return tuple(part for part in parts if part is not None)


def dataset(parts, batch_size):
    return tf.data.Dataset.from_tensor_slices(present(parts)).batch(batch_size)


def batch_of(case, parts, index):
    rows = slice(index * case.batch_size, (index + 1) * case.batch_size)
    return keras.tree.map_structure(lambda array: array[rows], present(parts))


def endless(case, parts, batches):
    while True:
        for index in range(batches):
            yield batch_of(case, parts, index)


class PyBatches(keras.utils.PyDataset):
    def __init__(self, case, parts, batches):
        super().__init__()
        self.case, self.parts, self.batches = case, parts, batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        return batch_of(self.case, self.parts, index)
