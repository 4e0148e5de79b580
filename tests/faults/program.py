"""The program that a row of the matrix runs: a small training that stops at the row's moment until the fault is done.

It writes its process id to the file `moments/MOMENT.ROLE INDEX`, and goes on when the file `moments/done` is there. A
fault that a process causes itself, such as an exception in a callback, is then raised by the process of the row's role.
"""

import json
import os
import sys
import time
from pathlib import Path

import tfdist
from tests.processes.jobs import place

PLAN = "TFDIST_TESTS_FAULT"  # the row, and its folder, as JSON
MOST_SECONDS = 30
MEMORY_BYTES = 4 << 30


class Plan:
    """What this process does, and when."""

    def __init__(self):
        for name, value in json.loads(os.environ[PLAN]).items():
            setattr(self, name, value)
        self.here = "{} {}".format(*place(os.environ))
        self.moments = Path(self.folder) / "moments"

    def reach(self, moment, waits=True):
        """Called at each moment: waits for the fault of the row, and causes it, if this is its moment."""
        done = self.moments / "done"
        if moment != self.moment or done.exists():
            return
        (self.moments / f".{self.here}").write_text(str(os.getpid()))
        (self.moments / f".{self.here}").rename(self.moments / f"{moment}.{self.here}")
        until = time.monotonic() + MOST_SECONDS
        while waits and not done.exists() and time.monotonic() < until:
            time.sleep(0.01)
        if self.here == self.role and (waits or done.exists()):
            self.cause()

    def cause(self):
        if self.fault == "exception":
            raise RuntimeError("the callback of the row has failed")
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "memory":
            bytearray(os.urandom(1 << 20)) * (MEMORY_BYTES >> 20)

    @property
    def causes_it(self):
        """Whether a process of this job causes the fault itself, in a callback."""
        return self.fault in ("exception", "exit", "memory")


def train(plan):
    import keras

    from tfdist import files

    strategy = tfdist.strategy(plan.engine, seed=1, timeout_seconds=plan.timeout_seconds, **plan.options)
    x, y = (part[:64] for part in tfdist.data.load("digits").arrays("train"))
    sync = files.sync

    def reached(path):
        if path.suffix == ".ckpt" and keep.epochs_seen > 1:
            plan.reach("checkpoint")
        sync(path)

    files.sync = reached
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    keep = moments(plan, keras.callbacks.Callback)
    callbacks = [keep, tfdist.callbacks.Checkpoint(Path(plan.folder) / "checkpoints", resume=True)]
    strategy.fit(model, x, y, batch_size=16, epochs=plan.epochs, validation_data=(x, y), verbose=0, callbacks=callbacks)


def moments(plan, base):
    """The callback that is at each moment of the training."""

    class Moments(base):
        epochs_seen = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs_seen += 1
            if self.epochs_seen > 2 and not plan.causes_it:
                plan.reach("training", waits=False)  # the fault comes in the middle of steps

        def on_test_begin(self, logs=None):
            if self.epochs_seen > 1:
                plan.reach("validation")

        def on_epoch_end(self, epoch, logs=None):
            if self.epochs_seen > 1 and plan.causes_it:
                plan.reach("checkpoint")
            if plan.stops and (plan.moments / "done").exists():
                self.model.stop_training = True

        def on_train_end(self, logs=None):
            plan.reach("end")

    class WithBatches(Moments):
        def on_train_batch_end(self, batch, logs=None):
            if self.epochs_seen > 1:
                plan.reach("training")

    return WithBatches() if plan.causes_it else Moments()


if __name__ == "__main__":
    plan = Plan()
    plan.reach("start")
    train(plan)
    print("ENDED")
