"""Horovod's example `tensorflow2_mnist`, a custom training loop, ported to Keras 3; see docs/horovod.md.

Run: horovodrun -np 2 python examples/horovod_mnist_loop.py [mnist]
"""

import sys

import tensorflow as tf

import tfdist.horovod as hvd
from tfdist import data

STEPS = 160

hvd.init()
for gpu in (gpus := tf.config.list_physical_devices("GPU")):
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# The digits dataset ships with scikit-learn, so that the example runs anywhere; `mnist` needs TensorFlow Datasets.
images, labels = data.load(sys.argv[1] if len(sys.argv) > 1 else "digits").arrays("train")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(10000).batch(128)

mnist_model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(32, [3, 3], activation="relu"),
        tf.keras.layers.Conv2D(64, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(128, activation="relu"),
        tf.keras.layers.Dropout(0.5),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(0.001 * hvd.size())
checkpoint = tf.train.Checkpoint(model=mnist_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = mnist_model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape, examples=tf.shape(images)[0])
    grads = tape.gradient(loss_value, mnist_model.trainable_variables)
    opt.apply_gradients(zip(grads, mnist_model.trainable_variables, strict=True))
    # After the first step, when the variables of the model and the optimizer exist.
    if first_batch:
        hvd.broadcast_variables(mnist_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (some_images, some_labels) in enumerate(dataset.take(STEPS // hvd.size())):
    loss_value = training_step(some_images, some_labels, batch == 0)
    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"Step #{batch}\tLoss: {loss_value:.6f}")
if hvd.rank() == 0:  # otherwise the processes would overwrite each other's files
    checkpoint.save("./checkpoints/mnist")
    mnist_model.compile(loss=loss, metrics=["accuracy"])
    print(mnist_model.evaluate(images, labels, verbose=0, return_dict=True))
