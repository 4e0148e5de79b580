"""A training that is interrupted within its first epoch."""

import keras


class InterruptionError(Exception):
    pass


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            raise InterruptionError
