"""A Keras script with tfdist's three lines: two replicas on the CPU, with the same weights as on one device.

Run: python examples/keras_script.py
"""

import keras
import numpy as np

import tfdist


def main() -> None:
    keras.utils.set_random_seed(0)
    strategy = tfdist.strategy("mirrored", devices=2)  # 1
    with strategy.scope():  # 2
        model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    strategy.prepare(model)  # 3

    rng = np.random.default_rng(0)
    x = rng.random((1000, 20), "float32")
    y = x[:, :3].argmax(axis=1)
    model.fit(x, y, batch_size=128, epochs=20, validation_split=0.1, verbose=2)
    print(model.evaluate(x, y, verbose=0, return_dict=True))


if __name__ == "__main__":
    main()
