"""The overhead of measuring during training: `Throughput`, `MemoryUsage` and the count of network bytes.

Trains epochs of one model in one process, with and without the callbacks in turn. The ratio is that of the two epochs
of a round, as in `tfdist compare`. The time inside the callbacks is also printed, because other work on the machine
affects it less. Example: `python -m benchmarks.measuring --models mlp cnn`
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15, help="rounds of two epochs")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up rounds")
    parser.add_argument("--examples", type=int, default=16_000, help="examples per epoch")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], metavar="NAME")
    arguments = parser.parse_args()
    for name in arguments.models:
        measure(name, arguments.examples, arguments.warmup, arguments.repeats)


def measure(name: str, examples: int, warmup: int, repeats: int) -> None:
    """Measures one model on images of 28x28 pixels, and prints the results."""
    import keras
    import psutil

    import tfdist
    from tfdist import callbacks, data, models, tasks
    from tfdist.study import ratios

    class Bytes(keras.callbacks.Callback):
        """Reads the number of sent bytes, like the record of a run."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.before = psutil.net_io_counters().bytes_sent

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["network_bytes"] = psutil.net_io_counters().bytes_sent - self.before

    spent: list[float] = []

    def timed(callback: Any) -> Any:
        """Makes the hooks of a callback record their duration."""
        for hook in ("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"):
            # Keras' own hooks do nothing; if they were replaced, the loop would call them at each step.
            if getattr(type(callback), hook) is not getattr(keras.callbacks.Callback, hook):
                setattr(callback, hook, _timed(getattr(callback, hook), spent))
        return callback

    source = data.load("synthetic", shape=(28, 28, 1), train=examples, validation=0, test=0)
    strategy = tfdist.strategy("single", seed=0)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.build(name, source.spec)
        tasks.compile(model, source.spec, keras.optimizers.Adam())
    feed = source.feed("train", BATCH, seed=0)
    seconds: dict[str, dict[int, float]] = {"without": {}, "with": {}}
    for number in range(warmup + repeats):
        for kind in list(seconds)[:: 1 if number % 2 else -1]:
            measuring = [callbacks.Throughput(), callbacks.MemoryUsage(), Bytes()] if kind == "with" else []
            if number == warmup and kind == "with":
                spent.clear()
            began = time.perf_counter()
            strategy.fit(model, feed, epochs=1, callbacks=list(map(timed, measuring)), verbose=0)
            seconds[kind][number - warmup] = time.perf_counter() - began
    measured = [{round_: value for round_, value in seconds[kind].items() if round_ >= 0} for kind in seconds]
    ratio, steps = ratios.of_rounds(measured[1], measured[0]), -(-examples // BATCH)
    assert ratio is not None
    epoch = statistics.median(measured[0].values())
    hooks = sum(spent) / repeats
    print(
        f"{name}: with / without {ratio.text}; a step takes {1e3 * epoch / steps:.3f} ms, of which the callbacks take "
        f"{1e6 * hooks / steps:.2f} µs: {hooks / epoch:.3%}",
        flush=True,
    )


def _timed(function: Any, spent: list[float]) -> Any:
    def hook(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            spent.append(time.perf_counter() - began)

    return hook


if __name__ == "__main__":
    main()
