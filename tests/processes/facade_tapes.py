"""What `test_horovod_facade.py` runs in each process of a job: Horovod's tapes and collectives, of Keras' variables."""

import keras
import numpy as np
import tensorflow as tf

import tfdist.horovod as hvd


def values_of(gradients):
    """Gradients as lists; rows of sparse ones that occur several times are added up."""
    return tf.nest.map_structure(
        lambda one: None if one is None else tf.convert_to_tensor(one).numpy().tolist(), gradients
    )


def tapes():
    """The gradient of w * x is x, which is 1 in process 0 and 2 in process 1."""
    x = tf.constant(1.0 + hvd.rank())
    of_keras, of_tensorflow, unused = keras.Variable([1.0]), tf.Variable([1.0]), keras.Variable([1.0])
    table = keras.Variable(tf.ones([3, 2]))

    def loss(tape=None):
        rows = tf.gather(table.value, [0, 1 + hvd.rank()])
        return tf.reduce_sum((of_keras + of_tensorflow) * x) + tf.reduce_sum(rows) * x

    def gradient(sources, tape=None, **options):
        inner = tf.GradientTape(persistent=True)
        with inner:
            target = loss()
        return hvd.DistributedGradientTape(inner, **options).gradient(target, sources, **(tape or {}))

    def of_entered():
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            target = loss()
        return tape.gradient(target, [of_keras])

    def of_watched():
        with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
            tape.watch([of_keras])
            target = loss()
        return tape.gradient(target, [of_keras, of_tensorflow])

    def of_persistent():
        with tf.GradientTape(persistent=True) as tape:
            target = loss()
            twice = 2 * target
        tape = hvd.DistributedGradientTape(tape)
        return [tape.gradient(target, of_keras), tape.gradient(twice, of_keras)]

    @tf.function
    def in_graph():
        return [gradient(of_keras), gradient({"a": of_keras}), gradient(of_keras, op=hvd.Sum)]

    def local():
        layer, shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"), of_keras
        with tf.GradientTape() as tape:
            target = tf.reduce_sum(layer(tf.ones([1, 1])) * x) + tf.reduce_sum(shared * x)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
        mine, ours = tape.get_local_and_global_gradients(target, [*layer.trainable_weights, shared])
        return values_of([gradient for _, gradient in [*mine, *ours]])

    zero = {"unconnected_gradients": tf.UnconnectedGradients.ZERO}
    found = {
        "single": gradient(of_keras),
        "list": gradient([of_keras, of_tensorflow]),
        "nested": gradient({"a": of_keras, "b": [of_tensorflow, unused]}),
        "zero": gradient([unused], zero),
        "output_gradients": gradient(of_keras, {"output_gradients": tf.constant(3.0)}),
        "sparse": gradient(table),
        "sparse_as_dense": gradient(table, sparse_as_dense=True),
        "sum": gradient([of_keras], op=hvd.Sum),
        "fp16": gradient([of_keras], compression=hvd.Compression.fp16),
        "examples": gradient([of_keras, table], examples=3 - 2 * hvd.rank()),
        "no_sources": gradient([]),
        "entered": of_entered(),
        "watched": of_watched(),
        "persistent": of_persistent(),
        "in_graph": in_graph(),
    }
    return values_of(found) | {"local": local()}


def collectives():
    """Each of them, of a variable of Keras that is 1 in process 0 and 2 in process 1."""
    one, four = keras.Variable([1.0 + hvd.rank()]), keras.Variable([[1.0 + hvd.rank()]] * 4)
    received, state = keras.Variable([1.0 + hvd.rank()]), keras.optimizers.Adam(0.1 * (1 + hvd.rank()))
    state.build([received])
    hvd.broadcast_variables([received, *state.variables], root_rank=1)
    also = keras.Variable([1.0 + hvd.rank()])
    hvd.broadcast_([also], root_rank=1)
    found = {
        "allreduce": hvd.allreduce(one),
        "allreduce_sum": hvd.allreduce(one, op=hvd.Sum),
        "allgather": hvd.allgather(one),
        "broadcast": hvd.broadcast(one, root_rank=1),
        "reducescatter": hvd.reducescatter(four)[:, 0],
        "alltoall": hvd.alltoall(four)[:, 0],
        "grouped_allreduce": hvd.grouped_allreduce([one, four])[0],
        "grouped_allgather": hvd.grouped_allgather([one])[0],
        "grouped_reducescatter": hvd.grouped_reducescatter([four])[0][:, 0],
        "broadcast_variables": received,
        "broadcast_": also,
    }
    found = {name: np.asarray(value).tolist() for name, value in found.items()}
    objects = {"broadcast_object": hvd.broadcast_object({"rank": hvd.rank()}, 1), "of_all": hvd.allgather_object(1)}
    return found | objects | {"rate": round(float(state.learning_rate), 6)}


def mnist_loop():
    """Horovod's loop of `tensorflow2_mnist`, with batches of 20 and 12, and one process on the joined batches."""
    keras.utils.set_random_seed(3)
    images, labels = np.random.rand(96, 6).astype("float32"), np.random.randint(0, 3, 96)

    def train(part, wrap, broadcast):
        keras.utils.set_random_seed(5 + (hvd.rank() if broadcast else 0))
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
        loss, optimizer = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.Adam(0.01)

        @tf.function(reduce_retracing=True)
        def step(images, labels, first_batch):
            with tf.GradientTape() as tape:
                value = loss(labels, model(images, training=True))
            gradients = wrap(tape, images).gradient(value, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            if first_batch and broadcast:
                hvd.broadcast_variables(model.variables, root_rank=0)
                hvd.broadcast_variables(optimizer.variables, root_rank=0)
            return value

        if broadcast:  # so that the first step is that of one process too
            hvd.broadcast_variables(model.variables, root_rank=0)
        for batch in range(3):
            mine = slice(32 * batch + part.start, 32 * batch + part.stop)
            step(images[mine], labels[mine], batch == 0)
        return np.concatenate([weight.ravel() for weight in model.get_weights()])

    alone = train(slice(0, 32), lambda tape, images: tape, broadcast=False)
    mine = slice(0, 20) if hvd.rank() == 0 else slice(20, 32)

    def wrap(tape, images):
        return hvd.DistributedGradientTape(tape, examples=tf.shape(images)[0])

    weights = hvd.allgather(train(mine, wrap, broadcast=True)[None]).numpy()
    return {
        "between": float(np.abs(weights - weights[0]).max()),
        "from_one_process": float(np.abs(weights[0] - alone).max()),
    }
