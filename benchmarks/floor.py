"""A lower bound for a step on this machine: the cost of the parts of an `mlp` step, compared with a `custom` step.

Each part runs many times in a `tf.while_loop` of a `tf.function`, on one thread, with the shapes of the step; the time
of an empty loop is subtracted. The measured step is the same as in `benchmarks.mlp_epoch`; it takes turns with the
parts.
Example: `python -m benchmarks.floor`
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import data, race

BATCH, INPUTS, UNITS, CLASSES = 32, 784, 128, 10
STEPS = 1875  # per epoch; a turn runs each part this number of times, like a turn of `custom`
STEP = "benchmarks.contestants:custom"
FLOOR = ("matrix products", "Adam")

# A part of a step: a function of the step's number. The loop carries its results, so that nothing is pruned.
Part = Callable[[Any], list[Any]]


def parts(job: race.Job, turns: race.Turns) -> None:
    """Measures the seconds per step of each part in each turn."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    loops = {name: _loop(part) for name, part in _parts(*data.load(job.data, "train", job.examples)).items()}
    for loop in loops.values():
        loop(tf.constant(STEPS))
    for turn in range(1, job.epochs + 1):
        turns.begin((turn - 1) * STEPS)
        seconds = {}
        for name, loop in loops.items():
            started = time.perf_counter()
            loop(tf.constant(STEPS))
            seconds[name] = (time.perf_counter() - started) / STEPS
        turns.note = json.dumps(seconds)
        turns.end(0.0, turn * STEPS)


def _parts(x: Any, y: Any) -> dict[str, Part]:
    import tensorflow as tf

    def variable(*shape: int) -> Any:
        return tf.Variable(tf.random.normal(shape, stddev=0.05))

    batch, hidden = variable(BATCH, INPUTS), variable(BATCH, UNITS)
    into_logits, into_hidden = variable(BATCH, CLASSES), variable(BATCH, UNITS)
    kernels = variable(INPUTS, UNITS), variable(UNITS, CLASSES)
    everything, labels = tf.constant(x.reshape(len(x), -1)), tf.constant(y)
    order = tf.random.shuffle(tf.range(len(x)))

    # Variables are read in each step, so that the graph optimizer cannot move a product out of the loop.
    def products(step: Any) -> list[Any]:
        return [
            tf.matmul(batch, kernels[0]),
            tf.matmul(hidden, kernels[1]),
            tf.matmul(into_logits, kernels[1], transpose_b=True),
            tf.matmul(hidden, into_logits, transpose_a=True),
            tf.matmul(batch, into_hidden, transpose_a=True),
        ]

    def gather(step: Any) -> list[Any]:
        indices = tf.slice(order, [step * BATCH], [BATCH])
        return [tf.gather(everything, indices), tf.gather(labels, indices)]

    def random(step: Any) -> list[Any]:
        return [tf.random.stateless_uniform([BATCH, UNITS], tf.stack([step, 1]))]

    def elementwise(step: Any) -> list[Any]:
        target = labels[:BATCH]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, into_logits.read_value())
        hits = tf.equal(tf.argmax(into_logits, 1, tf.int32), target)
        biased = tf.nn.relu(tf.nn.bias_add(hidden, kernels[0][0]))
        dropped = tf.where(into_hidden > 0.2, biased * 1.25, 0.0)
        bias_gradients = tf.reduce_sum(into_hidden, 0), tf.reduce_sum(into_logits, 0)
        return [tf.reduce_mean(losses), tf.reduce_sum(tf.cast(hits, tf.float32)), dropped, *bias_gradients]

    return {
        "empty loop": lambda step: [],
        "matrix products": products,
        "Adam": _adam([(INPUTS, UNITS), (UNITS,), (UNITS, CLASSES), (CLASSES,)], variable),
        "gather": gather,
        "random numbers": random,
        "elementwise, loss, metrics": elementwise,
    }


def _adam(shapes: list[tuple[int, ...]], variable: Callable[..., Any]) -> Part:
    """The update with TensorFlow's fused kernel, which reads the gradient, and updates the weights and two moments."""
    import tensorflow as tf

    slots = [[variable(*shape) for _ in range(3)] for shape in shapes]
    gradients = [tf.random.normal(shape) for shape in shapes]
    for _, _, squares in slots:
        squares.assign(tf.square(squares))

    def update(step: Any) -> list[Any]:
        for (weights, mean, squares), gradient in zip(slots, gradients, strict=True):
            tf.raw_ops.ResourceApplyAdam(
                var=weights.handle,
                m=mean.handle,
                v=squares.handle,
                beta1_power=0.9,
                beta2_power=0.999,
                lr=1e-3,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-7,
                grad=gradient,
            )
        return []

    return update


def _loop(part: Part) -> Any:
    import tensorflow as tf

    @tf.function(autograph=False)
    def loop(steps: Any) -> list[Any]:
        first = part(tf.constant(0))

        def body(step: Any, *carried: Any) -> list[Any]:
            return [step + 1, *part(step)]

        return tf.while_loop(lambda step, *carried: step < steps, body, [tf.constant(0), *first])[1:]

    return loop


def report(step_seconds: list[float], turns: list[Mapping[str, float]]) -> None:
    """Prints the table of microseconds and percent."""
    step = 1e6 * statistics.median(step_seconds)
    parts = {name: [1e6 * turn[name] for turn in turns] for name in turns[0]}
    empty = statistics.median(parts.pop("empty loop"))
    print(f"\nmlp, batch {BATCH}: microseconds per step, on one thread; {len(turns)} repeats in turn\n")
    print(f"{'part':<32}{'median':>9}{'min':>9}{'max':>9}{'of a step':>11}")

    def line(name: str, values: list[float]) -> float:
        median = statistics.median(values)
        print(f"{name:<32}{median:>9.1f}{min(values):>9.1f}{max(values):>9.1f}{median / step:>10.0%}")
        return median

    medians = {name: line(name, [value - empty for value in values]) for name, values in parts.items()}
    total = sum(medians.values())
    line("one turn of an empty loop", [empty])
    line("sum of the parts", [total + empty])
    line("`custom`, measured", [1e6 * seconds for seconds in step_seconds])
    floor = sum(medians[name] for name in FLOOR)
    print(f"\nfloor ({' + '.join(FLOOR)}): {floor:.1f} us, so `custom` takes {step / floor:.2f} times the floor")
    print(f"not in the parts (dispatch of operations, copies, reading variables): {step - total - empty:.1f} us")


def main() -> None:
    arguments = race.parser(__doc__).parse_args()
    contestants = race.chosen({"custom": STEP, "parts": "benchmarks.floor:parts"}, arguments.only)
    if len(contestants) < 2:
        sys.exit("`floor` compares `parts` with `custom`, and needs both")
    with race.examples(arguments.data_dir) as (folder, _):
        job = race.Job("mlp", BATCH, BATCH * STEPS, epochs=0, data=folder)
        tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
    notes = [json.loads(note) for note in tracks["parts"].notes]
    report([seconds / STEPS for seconds in tracks["custom"].seconds], notes)


if __name__ == "__main__":
    main()
