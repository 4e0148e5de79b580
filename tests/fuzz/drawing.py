"""What can be fuzzed: a `Case` is one training, a value that can be printed, pasted into `test_found.py` and run again.

Left out, since other tests hold it: random draws and batch normalization without `synchronized=True`
(`tests/contract/test_equality.py`), conditions and loops around updates (`tests/contract/test_users_steps.py`).

Avoided, since they are artefacts of stock Keras and no measure:

- an optimizer that is built inside the traced step begins anew at each step: optimizers are built beforehand;
- a metric whose `result()` is a variable itself is logged as what the variable holds after the validation: results are
  computed;
- `reset_state` of metrics that are not built yet is not called before the first epoch: states begin as reset;
- `loss_scale_factor` divides a sparse gradient of an own step, and raises: it is left out where there are tables;
- a metric function that returns one number cannot be weighed by example: there are none with sample weights;
- of data of unknown length stock Keras begins one step more, which counts in what does not depend on the batch, such
  as the optimizer's iterations and the tracker of the loss: such data have `steps_per_epoch`;
- with `steps_per_execution` it runs past `steps_per_epoch`, to the next multiple: of endless data there are none.

Left to the suite of the contract: mixed precision, in which a rounding of one unit of float32 measures nothing, and
XLA, which takes stock Keras seconds per case.
"""

from dataclasses import dataclass, replace

import hypothesis
from hypothesis import strategies as some

from tests.fuzz import pieces, steps

CONTESTANTS = (("custom", 2), ("mirrored", 2), ("custom", 3), ("mirrored", 3), ("single", 1))


ENDLESS = ("dataset repeated", "dataset of unknown length", "generator")


@dataclass(frozen=True)
class Case:
    """One training. Names are those of `pieces.py` and `steps.py`.

    Attributes:
        flattened: whether the head sees one vector per example.
        step: the pieces of an own `train_step`; () is Keras' own.
        scaled: whether a `LossScaleOptimizer` is around the optimizer.
        unseen: how many examples are evaluated or predicted.
        afterwards: what follows `fit`: "nothing", "evaluate" or "predict".
        seed: of the data.
    """

    inputs: str = "vectors"
    layers: tuple[str, ...] = ("dense",)
    form: str = "sequential"
    subclassed: bool = False
    flattened: bool = False
    outputs: int = 1
    target: str = "values"
    loss: str = "mse"
    reduction: str = "sum_over_batch_size"
    metrics: tuple[str, ...] = ()
    weighted_metrics: bool = False
    optimizer: str = "sgd"
    options: tuple[str, ...] = ()
    scaled: bool = False
    step: tuple[str, ...] = ()
    data: str = "arrays"
    sample_weights: bool = False
    class_weights: bool = False
    batch_size: int = 4
    examples: int = 7
    unseen: int = 5
    validation: str = "none"
    callbacks: tuple[str, ...] = ()
    afterwards: str = "nothing"
    eager: bool = False
    steps_per_execution: int = 1
    seed: int = 0


def _rarely(value, otherwise):
    """`value` in one of four draws."""
    return some.sampled_from([otherwise, otherwise, otherwise, value])


def _few(names, most):
    return some.lists(some.sampled_from(list(names)), max_size=most, unique=True).map(tuple)


@some.composite
def cases(draw):
    """Trainings that stock Keras on one device can do, and that can be equal."""
    inputs = draw(some.sampled_from(list(pieces.INPUTS)))
    chain, kind, keeps_length = draw(_chains(pieces.KIND_OF_INPUT[inputs]))
    tags = kind == "series" and keeps_length and inputs != "vectors" and draw(some.booleans())
    target = "tags" if tags else draw(some.sampled_from([name for name in pieces.TARGETS if name != "tags"]))
    form = draw(some.sampled_from(["sequential", "functional", "nested", "two inputs", "shared"]))
    step = draw(_steps(inputs)) if draw(some.booleans()) else ()
    options = draw(_options())
    case = Case(
        inputs=inputs,
        layers=chain,
        form=form,
        subclassed=draw(_rarely(True, False)),
        flattened=kind != "vector" and not tags,
        outputs=1 if form == "sequential" else draw(_rarely(2, 1)),
        target=target,
        loss=draw(some.sampled_from(list(pieces.LOSSES[target]))),
        reduction=draw(some.sampled_from(pieces.REDUCED)),
        metrics=draw(_few([*pieces.METRICS[target], *pieces.METRICS_OF_ANY], 3)),
        weighted_metrics=draw(some.booleans()),
        optimizer=draw(some.sampled_from(list(pieces.OPTIMIZERS))),
        options=options,
        scaled=draw(_rarely(True, False)),
        step=step,
        data=draw(some.sampled_from(["arrays", "dataset", "pydataset", *ENDLESS])),
        sample_weights=draw(_rarely(True, False)),
        class_weights=draw(_rarely(True, False)),
        batch_size=draw(some.integers(1, 8)),
        examples=draw(some.integers(1, 19)),
        unseen=draw(some.integers(1, 9)),
        validation=draw(some.sampled_from(["none", "none", "none", "arrays", "dataset", "split"])),
        callbacks=draw(_few(pieces.CALLBACKS, 2)),
        afterwards=draw(some.sampled_from(["nothing", "nothing", "evaluate", "predict"])),
        eager=draw(_rarely(True, False)) and draw(some.booleans()),
        steps_per_execution=draw(_rarely(3, 1)),
        seed=draw(some.integers(0, 3)),
    )
    return possible(case)


@some.composite
def _chains(draw, kind):
    """Layers one after the other from an input of `kind`; the kind that they give; whether they keep the length."""
    names, keeps_length = [], True
    for _ in range(draw(some.sampled_from([1, 2, 2, 3]))):
        fitting = [name for name, block in pieces.LAYERS.items() if block.takes in (kind, "any")]
        if kind in ("tokens", "words"):  # numbers of words are no quantities
            fitting = [name for name in fitting if pieces.LAYERS[name].takes == kind]
        name = draw(some.sampled_from(fitting))
        block = pieces.LAYERS[name]
        names.append(name)
        kind = kind if block.gives == "any" else block.gives
        keeps_length = keeps_length and block.keeps_length
    return tuple(names), kind, keeps_length


@some.composite
def _steps(draw, inputs):
    rounds = []
    for _ in range(draw(some.sampled_from([1, 1, 1, 2]))):
        rounds += draw(_few(steps.BEFORE, 1))
        rounds.append(draw(some.sampled_from(steps.GRADIENTS)))
        rounds += draw(_few(steps.BETWEEN, 1))
        rounds += draw(some.lists(some.sampled_from(steps.UPDATES), min_size=1, max_size=2, unique=True))
        rounds += draw(_few(steps.AFTER, 2))
    return (*draw(_few(["in a function"], 1)), *rounds)


@some.composite
def _options(draw):
    clipping = draw(some.sampled_from([(), (), ("clipnorm",), ("clipvalue",), ("global clipnorm",)]))
    average = draw(some.sampled_from([(), (), (), ("ema",), ("ema overwriting",)]))
    others = draw(_few(["weight decay", "accumulation", "loss scale", "schedule"], 2))
    return (*clipping, *average, *others)


def possible(case):
    """The nearest case that stock Keras can train and that is a measure."""
    changes = {}
    options, step, callbacks = case.options, case.step, case.callbacks
    if "schedule" in options:
        step = tuple(piece for piece in step if piece != "set the rate")
        callbacks = tuple(name for name in callbacks if name not in ("plateau", "scheduled"))
    if case.sample_weights:  # a mean of one value cannot be weighed by example
        changes["metrics"] = tuple(name for name in case.metrics if name != "spread")
    if any("embedded" in name or "position" in name or "embedding" in name for name in case.layers):
        options = tuple(name for name in options if name != "loss scale")
    if case.scaled:
        options = tuple(name for name in options if name != "loss scale")
    if "average" not in step:
        step = tuple(piece for piece in step if piece != "swap in averages")
    if "ema" not in options or case.scaled:
        callbacks = tuple(name for name in callbacks if name != "swapped averages")
    if case.data != "arrays" or case.class_weights or case.examples < 2:
        changes["validation"] = "none" if case.validation == "split" else case.validation
    if "tokens and positions of one table" in case.layers:
        changes["eager"] = False  # docs/contract.md: without a graph the two lookups cannot be distinguished
    # A weight per example does not weigh positions: Keras lays it along them where there are as many of both.
    if case.loss == "dice of each channel" or case.target == "tags":
        changes["sample_weights"] = False
    if case.outputs == 2 or case.target != "classes" or case.sample_weights or case.data == "generator":
        changes["class_weights"] = False
    if case.data in ENDLESS:
        changes["steps_per_execution"] = 1
    elif case.steps_per_execution > 1:
        callbacks = tuple(name for name in callbacks if name != "logs of batches")
    return replace(case, options=options, step=step, callbacks=callbacks, **changes)


def drawn(seed, count):
    """The cases of `seed`: the same in every process.

    Each is drawn by itself, since Hypothesis would draw neighbours of what it has drawn before.
    """
    return [_one(seed * 100_000 + index) for index in range(count)]


def _one(seed):
    found = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=2,  # the first is the simplest
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def collect(case):
        found.append(case)

    collect()
    return found[-1]
