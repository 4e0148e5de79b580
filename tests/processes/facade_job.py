"""What `test_horovod_facade.py` runs in each process of a job: trainings over Horovod, and the same in one process.

Usage, below `horovodrun` or `mpirun`: python -m tests.processes.facade_job FOLDER [NAME ...]
"""

import functools
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd
from tests.processes import facade_tapes
from tfdist import data

GLOBAL_BATCH = 32
SGD = keras.optimizers.SGD


class OwnStep(keras.Sequential):
    """A step of its own, with an optimizer for each half of the variables."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients[:2], self.trainable_variables[:2], strict=True))
        self.second_optimizer.apply(gradients[2:], self.trainable_variables[2:])
        return {"loss": loss}


class Subclassed(keras.Model):
    """A model that its first batch builds, so that the first step is taken before the broadcast."""

    def __init__(self):
        super().__init__()
        self.hidden, self.logits = keras.layers.Dense(16, "tanh"), keras.layers.Dense(10)

    def call(self, x):
        return self.logits(self.hidden(x))


def dense(kind=keras.Sequential):
    return kind([keras.Input((64,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(10)])


def embedding():
    shades = [keras.Input((64,)), keras.layers.Rescaling(16), keras.layers.Embedding(17, 4), keras.layers.Flatten()]
    return keras.Sequential([*shades, keras.layers.Dense(10)])


# name: model, the optimizer in one process, how it is distributed, further arguments of `compile`
CASES = {
    "sgd": (dense, lambda: SGD(0.1), {}, {}),
    "momentum_and_clipnorm": (dense, lambda: SGD(0.1, momentum=0.9, clipnorm=0.05), {}, {}),
    "adam_and_global_clipnorm": (dense, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05), {}, {}),
    "gradient_accumulation": (dense, lambda: SGD(0.1, gradient_accumulation_steps=2, clipnorm=0.05), {}, {}),
    "moving_average": (dense, lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=3), {}, {}),
    "sparse_gradients": (embedding, lambda: SGD(0.1), {}, {}),
    "sparse_gradients_as_dense": (embedding, lambda: SGD(0.1), {"sparse_as_dense": True}, {}),
    "predivided": (dense, lambda: SGD(0.1), {"gradient_predivide_factor": 2.0}, {}),
    "steps_per_execution": (dense, lambda: SGD(0.1), {}, {"steps_per_execution": 2}),
    "run_eagerly": (dense, lambda: SGD(0.1), {}, {"run_eagerly": True}),
    "built_by_the_first_batch": (Subclassed, lambda: SGD(0.1), {}, {}),
    "half_precision_on_the_wire": (dense, lambda: SGD(0.1), {"compression": hvd.Compression.fp16}, {}),
    "xla_is_left_out": (dense, lambda: SGD(0.1), {}, {"jit_compile": True}),
}


def digits():
    """128 real examples; pixels from 0 to 1, labels."""
    x, y = data.load("digits").limit(128).arrays("train")
    return x.reshape(128, 64).astype("float32"), y


def fit(model, part=slice(None), batch=GLOBAL_BATCH, callbacks=(), epochs=2, examples=None):
    x, y = examples or digits()
    return model.fit(x[part], y[part], batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def fit_mine(model, callbacks=(), **options):
    """This process' part of each global batch, from rank 0's weights."""
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    part = slice(hvd.rank(), None, hvd.size())
    return fit(model, part, GLOBAL_BATCH // hvd.size(), [begin, *callbacks], **options)


def compiled(model, optimizer, loss=None, **options):
    model.compile(optimizer, loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def flat(model):
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def compare(distributed, alone=None):
    """The largest differences of the weights: between the processes, and from one process."""
    mine = flat(distributed)
    everyones = hvd.allgather(mine[None]).numpy()
    found = {"between": float(np.abs(everyones - everyones[0]).max())}
    if alone is not None:
        found["from_one_process"] = float(np.abs(everyones[0] - flat(alone)).max())
    return found


def case(make, make_optimizer, options, compile_options):
    keras.utils.set_random_seed(5)
    alone = compiled(make(), make_optimizer(), **compile_options | {"jit_compile": False})
    fit(alone)
    keras.utils.set_random_seed(5 + hvd.rank())
    distributed = compiled(make(), hvd.DistributedOptimizer(make_optimizer(), **options), **compile_options)
    fit_mine(distributed)
    return compare(distributed, alone)


def trained_before_by_one():
    """The others get the state of its optimizer too."""
    keras.utils.set_random_seed(5)
    alone = compiled(dense(), SGD(0.1, momentum=0.9))
    fit(alone)
    distributed = compiled(dense(), hvd.DistributedOptimizer(SGD(0.1, momentum=0.9)))
    if hvd.rank() == 0:
        distributed.set_weights(alone.get_weights())
        distributed.optimizer.build(distributed.trainable_variables)
        for mine, trained in zip(distributed.optimizer.variables, alone.optimizer.variables, strict=True):
            mine.assign(trained)
    fit(alone)
    fit_mine(distributed)
    return compare(distributed, alone)


def sum_of_gradients():
    keras.utils.set_random_seed(5)
    alone, distributed = dense(), dense()
    distributed.set_weights(alone.get_weights())
    fit(compiled(alone, SGD(0.1)))
    fit_mine(compiled(distributed, hvd.DistributedOptimizer(SGD(0.1 / hvd.size()), op=hvd.Sum)))
    return compare(distributed, alone)


def several_passes(make_optimizer, average=True):
    """Two passes before an update, as Keras' own accumulation makes them in one process."""
    keras.utils.set_random_seed(5)
    alone, distributed = dense(), dense()
    distributed.set_weights(alone.get_weights())
    fit(compiled(alone, make_optimizer(0.1, gradient_accumulation_steps=2)))
    optimizer = make_optimizer(0.1 if average else 0.05)
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
    fit_mine(compiled(distributed, hvd.DistributedOptimizer(optimizer, **options)))
    assert int(optimizer.iterations) == int(alone.optimizer.iterations) == 4
    return compare(distributed, alone)


def loss_scaling(wrap):
    """An overflow in one process alone skips the step in all."""
    x, y = digits()
    x[41] = np.inf  # in the second global batch, odd and so of rank 1
    keras.utils.set_random_seed(5)
    alone, distributed = dense(), dense()
    distributed.set_weights(alone.get_weights())
    scaled = keras.optimizers.LossScaleOptimizer
    fit(compiled(alone, scaled(SGD(0.1, clipnorm=0.05), initial_scale=8.0)), examples=(x, y))
    fit_mine(compiled(distributed, wrap(SGD(0.1, clipnorm=0.05))), examples=(x, y))
    found = compare(distributed, alone)
    return found | {"scale": float(distributed.optimizer.dynamic_scale), "in_one": float(alone.optimizer.dynamic_scale)}


def own_step():
    keras.utils.set_random_seed(5)
    alone, distributed = dense(OwnStep), dense(OwnStep)
    distributed.set_weights(alone.get_weights())
    alone.second_optimizer, distributed.second_optimizer = SGD(0.05), hvd.DistributedOptimizer(SGD(0.05))
    for optimizer, model in ((alone.second_optimizer, alone), (distributed.second_optimizer, distributed)):
        optimizer.build(model.trainable_variables[2:])
    fit(compiled(alone, SGD(0.1)))
    fit_mine_without_broadcast(compiled(distributed, hvd.DistributedOptimizer(SGD(0.1))))
    return compare(distributed, alone)


def fit_mine_without_broadcast(model):
    fit(model, slice(hvd.rank(), None, hvd.size()), GLOBAL_BATCH // hvd.size())


# Of each global batch of 32 examples, process 0 has 24 and process 1 has 8; of the last, 12 and 4.
PARTS, OWN_BATCH, LAST = ((0, 24), (24, 32)), (24, 8), ((0, 12), (12, 16))


def of_different_sizes(
    make, optimizer, options=None, weights=None, alone=None, loss=None, own_weights=None, steps=0, make_one=None
):
    """Batches of different sizes, and what one process trains on the joined batches.

    `weights` are those of examples of either process in one process, which `alone` optimizes; `own_weights` those of
    all examples wherever they are. With `steps`, an example has that number of targets.
    """
    x, y = (array[:112] for array in digits())
    y = np.repeat(y[:, None], steps, 1) if steps else y
    begin, end = PARTS[hvd.rank()]
    mine = [slice(first + begin, first + end) for first in (0, 32, 64)]
    mine.append(slice(96 + LAST[hvd.rank()][0], 96 + LAST[hvd.rank()][1]))
    keras.utils.set_random_seed(5)
    one, distributed = (make_one or make)(), make()
    distributed.set_weights(one.get_weights())
    if weights is not None:
        own_weights = np.concatenate([np.repeat(weights, OWN_BATCH)] * 3 + [np.repeat(weights, [12, 4])])
    compiled(one, (alone or optimizer)(), loss=loss).fit(
        x, y, sample_weight=own_weights, batch_size=32, epochs=2, shuffle=False, verbose=0
    )
    arrays = (x, y) if own_weights is None or weights is not None else (x, y, own_weights)
    x, y, *own = (np.concatenate([array[part] for part in mine]) for array in arrays)
    compiled(distributed, hvd.DistributedOptimizer(optimizer(), **(options or {})), loss=loss).fit(
        x, y, OWN_BATCH[hvd.rank()], epochs=2, shuffle=False, verbose=0, sample_weight=own[0] if own else None
    )
    return compare(distributed, one)


def normalized(kind):
    return keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(16), kind(momentum=0.5), keras.layers.ReLU(), keras.layers.Dense(10)]
    )


def masked():
    shades = [keras.Input((64,)), keras.layers.Rescaling(16), keras.layers.Embedding(17, 4, mask_zero=True)]
    return keras.Sequential([*shades, keras.layers.Dense(10)])


def cross_entropy(reduction):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def passes_of_different_sizes():
    """Two passes before an update: the mean over all their examples in all processes, here of 64, and of 48."""
    x, y = (array[:112] for array in digits())
    keras.utils.set_random_seed(5)
    alone, distributed = dense(), dense()
    distributed.set_weights(alone.get_weights())
    compiled(alone, SGD(0.1))
    for part in (slice(0, 64), slice(64, 112)):
        alone.train_on_batch(x[part], y[part])
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    compiled(distributed, hvd.DistributedOptimizer(SGD(0.1), **options))
    for first, (begin, end) in zip((0, 32, 64, 96), [PARTS[hvd.rank()]] * 3 + [LAST[hvd.rank()]], strict=True):
        part = slice(first + begin, first + end)
        distributed.train_on_batch(x[part], y[part])
    return compare(distributed, alone)


def graphs_that_differ():
    """The last batch has twelve examples in one process and four in the other."""
    model = compiled(dense(), hvd.DistributedOptimizer(SGD(0.1)))
    part = slice(0, 60) if hvd.rank() == 0 else slice(60, 112)
    fit(model, part, 16, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    return compare(model)


class Rates(keras.callbacks.Callback):
    """Notes the learning rate of each batch, and what the logs have before others change them."""

    def __init__(self):
        super().__init__()
        self.rates, self.losses = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(logs["loss"])


def callbacks():
    rates = Rates()
    after = hvd.callbacks.LearningRateScheduleCallback(0.2, 0.5, start_epoch=2)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1)
    model = compiled(dense(), hvd.DistributedOptimizer(SGD(0.2)))
    history = fit_mine(model, [rates, warmup, after, hvd.callbacks.MetricAverageCallback()], epochs=4)
    return {"rates": rates.rates, "losses": rates.losses, "history": history.history}


def checkpoints(folder):
    """Rank 0 alone saves and restores a training; the others go on with it."""
    model = compiled(dense(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    fit_mine(model)
    path = folder / "model.keras"
    if hvd.rank() == 0:
        model.save(path)
        np.save(folder / "weights.npy", flat(model))
    hvd.allreduce(0.0, name="saved")
    loaded = hvd.load_model(path)
    kind = type(loaded.optimizer).__name__
    if hvd.rank() > 0:
        loaded.set_weights([weight * 0 for weight in loaded.get_weights()])
    fit_mine(loaded)
    return compare(loaded) | {"kind": kind, "iterations": int(loaded.optimizer.iterations)}


def values():
    """The collectives, of plain values and of Keras' variables."""
    rank = hvd.rank()
    variable = keras.Variable([float(rank)])
    hvd.broadcast_variables([variable, tf.Variable(rank)], root_rank=1)
    return {
        "allreduce": float(hvd.allreduce(float(rank))),
        "sum": hvd.allreduce([rank, 1], op=hvd.Sum).numpy().tolist(),
        "allgather": hvd.allgather([rank]).numpy().tolist(),
        "broadcast": int(hvd.broadcast(rank + 7, root_rank=1)),
        "variable": float(variable.numpy()[0]),
        "size": hvd.size(),
    }


def inside(optimizer):
    return hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0))


def outside(optimizer):
    """As `compile` does under the policy `mixed_float16`."""
    return keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(optimizer), initial_scale=8.0)


def jobs(folder):
    """What can be run, by name."""
    return {name: functools.partial(case, *arguments) for name, arguments in CASES.items()} | {
        "sum_of_gradients": sum_of_gradients,
        "several_passes": functools.partial(several_passes, keras.optimizers.Adam),
        "several_passes_added_up": functools.partial(several_passes, SGD, average=False),
        "loss_scaling_inside": functools.partial(loss_scaling, inside),
        "loss_scaling_outside": functools.partial(loss_scaling, outside),
        "own_step": own_step,
        "trained_before_by_one": trained_before_by_one,
        "different_sizes": functools.partial(of_different_sizes, dense, lambda: SGD(0.1)),
        "different_sizes_adam_clipped": functools.partial(
            of_different_sizes, dense, lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05)
        ),
        "different_sizes_sparse": functools.partial(of_different_sizes, embedding, lambda: SGD(0.1)),
        "different_sizes_scaled": functools.partial(
            of_different_sizes, dense, lambda: keras.optimizers.LossScaleOptimizer(SGD(0.1), initial_scale=8.0)
        ),
        "different_sizes_plain_mean": functools.partial(
            of_different_sizes, dense, lambda: SGD(0.1), {"average_over": "processes"}, (32 / 48, 32 / 16)
        ),
        "different_sizes_masked": functools.partial(of_different_sizes, masked, lambda: SGD(0.1), steps=64),
        "different_sizes_weighted": functools.partial(
            of_different_sizes,
            dense,
            lambda: SGD(0.1),
            loss=cross_entropy("mean_with_sample_weight"),
            own_weights=np.linspace(0, 2, 112),
        ),
        "different_sizes_sum": functools.partial(  # the mean of the processes' sums
            of_different_sizes, dense, lambda: SGD(0.01), alone=lambda: SGD(0.005), loss=cross_entropy("sum")
        ),
        "different_sizes_normalized": functools.partial(
            of_different_sizes,
            functools.partial(normalized, hvd.SyncBatchNormalization),
            lambda: SGD(0.1),
            make_one=functools.partial(normalized, keras.layers.BatchNormalization),
        ),
        "different_sizes_passes": passes_of_different_sizes,
        "graphs_that_differ": graphs_that_differ,
        "callbacks": callbacks,
        "checkpoints": functools.partial(checkpoints, folder),
        "values": values,
        "tapes": facade_tapes.tapes,
        "collectives": facade_tapes.collectives,
        "mnist_loop": facade_tapes.mnist_loop,
    }


def main(folder, *names):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    known = jobs(folder)
    results = {name: known[name]() for name in names or known}
    (folder / f"rank-{hvd.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
