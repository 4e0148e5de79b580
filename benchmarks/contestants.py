"""The contestants: each function trains a model in a usual way, one epoch per turn.

All use the same arrays, Adam at 1e-3 and Keras' sparse cross-entropy on logits, and compute loss and accuracy. A
contestant tunes its settings (thread counts, steps per call) before its first turn, on a model that is then discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import data
from benchmarks.race import Job, Turns

STEPS_PER_EXECUTION = (50, 100, 400)


# Stock Keras


def fit(job: Job, turns: Turns) -> None:
    """`model.fit(x, y)` with Keras' defaults."""
    x, y = _arrays(job)
    model = new_model(job)
    compile_model(model)
    model.fit(x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


def fit_tuned(job: Job, turns: Turns) -> None:
    """Tuned stock fit: tf.data, no XLA, the best of several `steps_per_execution`."""
    dataset = _dataset(job)

    def prepared(steps: int) -> Any:
        model = new_model(job)
        compile_model(model, jit_compile=False, steps_per_execution=steps)
        return model

    steps = _fastest(STEPS_PER_EXECUTION, lambda steps: _epoch_seconds(prepared(steps), dataset))
    turns.note = f"steps_per_execution={steps}"
    prepared(steps).fit(dataset, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


def fit_tuned_1_thread(job: Job, turns: Turns) -> None:
    """`fit_tuned` with one thread per operation and two operations in parallel, which is faster for small models."""
    _threads(intra=1, inter=2)
    fit_tuned(job, turns)


def function_loop(job: Job, turns: Turns) -> None:
    """A `tf.function` by hand: one call per epoch, over the dataset, with Keras' own `train_step`."""
    import tensorflow as tf

    dataset = _dataset(job)
    model = new_model(job)
    compile_model(model, jit_compile=False)
    _build(model, job)

    @tf.function
    def epoch() -> None:
        for batch in dataset:
            model.train_step(batch)

    for _ in range(job.epochs):
        turns.begin(model.optimizer.iterations.numpy())
        model.reset_metrics()
        epoch()
        loss = float(model.get_metrics_result()["loss"])
        turns.end(loss, model.optimizer.iterations.numpy())


def function_loop_1_thread(job: Job, turns: Turns) -> None:
    """`function_loop` with one thread per operation and two operations in parallel."""
    _threads(intra=1, inter=2)
    function_loop(job, turns)


# Stock Keras under tf.distribute.MirroredStrategy


def mirrored_fit(job: Job, turns: Turns) -> None:
    """`model.fit(x, y)` with a model made under `tf.distribute.MirroredStrategy`."""
    x, y = _arrays(job)
    with _mirrored(job).scope():
        model = new_model(job)
        compile_model(model)
    model.fit(x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


def mirrored_fit_tuned(job: Job, turns: Turns) -> None:
    """`mirrored_fit` with tf.data and no XLA; with `steps_per_execution` above 1 stock Keras fails here."""
    strategy = _mirrored(job)  # splits the CPU, which must come before TensorFlow runs anything
    dataset = _dataset(job)
    with strategy.scope():
        model = new_model(job)
        compile_model(model, jit_compile=False)
    model.fit(dataset, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


# tfdist


def custom(job: Job, turns: Turns) -> None:
    """tfdist `custom`, with the number of threads that `tfdist train` chooses."""
    _tfdist(job, turns, "custom", threads=_chosen_threads(job))


def single(job: Job, turns: Turns) -> None:
    """tfdist `single`, with the number of threads that `tfdist train` chooses."""
    _tfdist(job, turns, "single", threads=_chosen_threads(job))


def _chosen_threads(job: Job) -> int | None:
    from tfdist.data.spec import DataSpec
    from tfdist.run import session

    spec = DataSpec("fashion_mnist", "classification", (28, 28, 1), 10, {"train": job.examples})
    return 1 if session.step_is_small(job.model, spec, job.batch_size) else None


def mirrored(job: Job, turns: Turns) -> None:
    """tfdist `mirrored` on `job.devices` logical CPU devices."""
    _tfdist(job, turns, "mirrored", devices=job.devices)


def custom_devices(job: Job, turns: Turns) -> None:
    """tfdist `custom` on `job.devices` logical CPU devices."""
    _tfdist(job, turns, "custom", devices=job.devices)


def _tfdist(job: Job, turns: Turns, name: str, **options: Any) -> None:
    import tfdist

    strategy = tfdist.strategy(name, seed=job.seed, **options)
    x, y = _arrays(job)
    with strategy.scope():
        model = new_model(job)
        compile_model(model)
    strategy.prepare(model)
    model.fit(x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0, callbacks=[turns.callback()])


# PyTorch


def torch_loop(job: Job, turns: Turns) -> None:
    """`mlp` in PyTorch by hand, on one thread: data in memory, indexed by a permutation, fused Adam."""
    _torch(job, turns, threads=1)


def torch_loop_all_threads(job: Job, turns: Turns) -> None:
    """`torch_loop` on all threads; which one is faster depends on the load of the machine."""
    import torch

    _torch(job, turns, threads=torch.get_num_threads())


def _torch(job: Job, turns: Turns, threads: int) -> None:
    import torch

    assert job.model == "mlp", "the PyTorch loop is written for `mlp`"
    torch.set_num_threads(threads)
    turns.note = f"threads={threads}"
    x, y = (torch.from_numpy(array) for array in _arrays(job))
    epoch = _torch_epoch(job, x, y.long())
    for number in range(job.epochs):
        turns.begin(number * job.steps)
        loss, steps = epoch()
        turns.end(loss, steps)


def _torch_epoch(job: Job, x: Any, y: Any) -> Callable[[], tuple[float, int]]:
    """Returns a function that trains one epoch and returns its loss and the optimizer's number of steps so far."""
    import torch
    from torch import nn

    torch.manual_seed(job.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7, fused=True)
    criterion = nn.CrossEntropyLoss()

    def epoch() -> tuple[float, int]:
        model.train()
        loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for indices in torch.randperm(len(x)).split(job.batch_size):
            inputs, labels = x[indices], y[indices]
            optimizer.zero_grad(set_to_none=True)
            logits = model(inputs)
            loss = criterion(logits, labels)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            correct += (logits.argmax(1) == labels).sum()
        assert 0 < int(correct) <= len(x)
        steps = max(int(state["step"]) for state in optimizer.state.values())
        return float(loss_sum) / len(x), steps

    return epoch


# Shared helpers


def _arrays(job: Job) -> data.Arrays:
    return data.load(job.data, "train", job.examples)


def _dataset(job: Job) -> Any:
    """The usual pipeline over arrays; a cache would only copy data that are already in memory."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(_arrays(job)).shuffle(job.examples, seed=job.seed)
    even = job.examples % job.batch_size == 0  # then nothing is dropped, and static shapes make the graph faster
    return dataset.batch(job.batch_size, drop_remainder=even).prefetch(tf.data.AUTOTUNE)


def new_model(job: Job) -> Any:
    import keras

    import tfdist.models
    from tfdist.data import DataSpec

    keras.utils.set_random_seed(job.seed)
    spec = DataSpec("fashion_mnist", "classification", (28, 28, 1), 10, {"train": job.examples})
    return tfdist.models.build(job.model, spec)


def compile_model(model: Any, **options: Any) -> None:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, metrics=["accuracy"], **options)


def _build(model: Any, job: Job) -> None:
    """Creates the variables of optimizer and metrics before a loop is traced."""
    x, y = _arrays(job)
    model.optimizer.build(model.trainable_variables)
    model.evaluate(x[: job.batch_size], y[: job.batch_size], verbose=0)


def _mirrored(job: Job) -> Any:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * job.devices)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(job.devices)])


def _threads(*, intra: int, inter: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)


def _fastest(options: Iterable[int], seconds: Callable[[int], float]) -> int:
    return min(options, key=seconds)


def _epoch_seconds(model: Any, dataset: Any) -> float:
    """The seconds of the faster of two epochs, after an epoch that traces."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        model.fit(dataset, verbose=0)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
