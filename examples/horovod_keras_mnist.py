"""Horovod's example `tensorflow2_keras_mnist`, ported to Keras 3; docs/horovod.md lists the changes.

Run: horovodrun -np 2 python examples/horovod_keras_mnist.py [mnist]
"""

import sys

import tensorflow as tf

import tfdist.horovod as hvd
from tfdist import data

EPOCHS = 4
STEPS = 160

hvd.init()
for gpu in (gpus := tf.config.list_physical_devices("GPU")):
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# The digits dataset ships with scikit-learn, so that the example runs anywhere; `mnist` needs TensorFlow Datasets.
images, labels = data.load(sys.argv[1] if len(sys.argv) > 1 else "digits").arrays("train")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(10000).batch(128)

model = tf.keras.Sequential(
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

# The learning rate grows with the number of processes, like the global batch.
rate = 0.001 * hvd.size()
optimizer = tf.keras.optimizers.Adam(rate)
optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=optimizer, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=3, verbose=1),
]
if hvd.rank() == 0:  # otherwise the processes would overwrite each other's files
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

model.fit(
    dataset,
    steps_per_epoch=STEPS // hvd.size(),
    callbacks=callbacks,
    epochs=EPOCHS,
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    print(model.evaluate(images, labels, verbose=0, return_dict=True))
