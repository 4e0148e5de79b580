"""`fit`, `evaluate` and `predict` for compiled Keras models with any strategy.

There are two loops, as in Orbit: the inner loop is a graph that runs many steps, the outer loop calls Keras' callbacks.

    fit                                    outer, Python
    ├─ on_train_begin, on_epoch_begin
    ├─ while the epoch lasts
    │  ├─ on_train_batch_begin(first)
    │  ├─ program.run(first, count)        inner, one graph: for each step, on each replica, model.train_step
    │  └─ on_train_batch_end(last, logs)   logs: the current metrics, as numbers
    ├─ evaluate on the validation data     the same two loops with model.test_step
    └─ on_epoch_end(epoch, logs), on_train_end

A call of the inner loop runs until a callback must be called (see `tfdist.loop.steps_per_call`), but at most about half
a second, so that progress is shown and Ctrl-C takes effect.

Before the first step, the processes of a job check that they train the same model on the same data with the same seed,
and broadcast the chief's variables. During an epoch they exchange only gradients, since all processes make the same
updates. At the end of each epoch they compare checksums of the weights. Otherwise a change in one process alone would
go unnoticed: a callback that sets the learning rate only in the chief, or a processor that rounds differently.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfdist.checkpointing import state as training_state
from tfdist.checkpointing import writer
from tfdist.data.input import adapters, job_feeds
from tfdist.data.input.dataset_feed import BatchFeed
from tfdist.data.input.feed import DataPasses, Feed
from tfdist.errors import DifferenceWarning, UsageError
from tfdist.groups import parts
from tfdist.interface.program import AtNan, Logs, Program
from tfdist.interface.strategy import Strategy, seed_of_random
from tfdist.interface.variables import checksum, differ
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_data, keras_patches, keras_routes
from tfdist.internals.keras import tree
from tfdist.internals.patching import Attached
from tfdist.jobs import consensus
from tfdist.loop import agreement, building, metrics, programs, steps_per_call

# Callbacks that only the chief runs, since processes that share a disk would write the same files.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
# The attributes of a model that callbacks set to end a `fit`, `evaluate` or `predict`.
STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


def fit(
    strategy: Strategy,
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    before_training: Callable[[Feed], None] = lambda feed: None,
) -> keras.callbacks.History:
    """Trains `model`, with the arguments and the result of `keras.Model.fit`.

    `batch_size` is global. If a callback sets its attribute `resume_batch` in `on_train_begin`, the first epoch begins
    at that batch, and the metrics are not reset. `before_training` is called with the data before the first step.

    Raises:
        UsageError: the model is not compiled, or was not created for this strategy.
        DataError: there are no batches.
    """
    check(strategy, model, "fit")
    _settle_seed(strategy, callbacks)
    epochs, initial_epoch = _whole("epochs", epochs), _whole("initial_epoch", initial_epoch)
    batch_size, size = _size("batch_size", batch_size), _size("validation_batch_size", validation_batch_size)
    epoch_numbers = range(initial_epoch, min(epochs, keras_internals.max_epochs() or epochs))
    steps = _limited("steps_per_epoch", steps_per_epoch)
    request = adapters.request(
        x, y, sample_weight, class_weight=class_weight, batch_size=batch_size, steps=steps, shuffle=shuffle
    )
    if validation_split and validation_data is None:
        request, validation_data = adapters.split(request, validation_split)
    feed = feed_of(strategy, request)
    limit = _limited("validation_steps", validation_steps)
    validate = _validation(strategy, validation_data, size or batch_size, limit, validation_freq)
    programs.build(strategy, model, "train", feed)
    with DataPasses(feed, steps) as passes, writer.finished():
        passes.reset()
        before_training(feed)
        agreement.require_equal_training(strategy, model, passes, epoch_numbers, shuffle)
        callbacks = _callback_list(
            strategy, model, callbacks, verbose, passes, epochs=epoch_numbers.stop, add_history=True
        )
        _run_epochs(strategy, model, passes, epoch_numbers, callbacks, validate)
    return model.history


# Evaluates a model with a `CallbackList` after an epoch; the logs are empty if no evaluation is due.
Validate = Callable[[Any, Any, int], Logs]


def _validation(strategy: Strategy, data: Any, batch_size: int | None, steps: int | None, frequency: Any) -> Validate:
    """Returns the evaluation on the validation data of a `fit`; `data` is `None` if there are none."""
    if data is None:
        return lambda model, callbacks, epoch: {}
    x, y, sample_weight = keras_data.unpack_x_y_sample_weight(data)
    arguments = {"x": x, "y": y, "sample_weight": sample_weight, "batch_size": batch_size, "steps": steps}
    feed = feed_of(strategy, adapters.request(**arguments, passes=True))

    def validate(model: Any, callbacks: Any, epoch: int) -> Logs:
        if not keras_internals.validates(model, epoch, frequency):
            return {}
        # Like Keras' own `fit`, calls the model's `evaluate`, which may be overridden or wrapped.
        with keras_routes.validating(model, strategy, feed):
            logs: Logs = model.evaluate(
                **arguments, callbacks=callbacks, return_dict=True, _use_cached_eval_dataset=True
            )
        return logs

    return validate


def _run_epochs(
    strategy: Strategy,
    model: Any,
    passes: DataPasses,
    epochs: range,
    callbacks: Any,
    validate: Validate,
) -> None:
    runner = EpochRunner(strategy, model, "train", passes, callbacks)
    model.stop_training = False
    callbacks.on_train_begin()
    initial_epoch, resume_batch, next_pass = _start_together(strategy, model, callbacks, epochs.start)
    passes.begin_at(initial_epoch, resume_batch, next_pass)
    epoch_logs: Logs | None = None
    for epoch in range(initial_epoch, epochs.stop):
        if not resume_batch:
            metrics.reset(strategy, model)
        callbacks.on_epoch_begin(epoch)
        epoch_logs = dict(runner.run(resume_batch or 0))
        _next_pass.set(model, passes.next)
        resume_batch = None
        epoch_logs.update({f"val_{name}": value for name, value in validate(model, callbacks, epoch).items()})
        with strategy.whole_state(model) if callbacks.saves_models else contextlib.nullcontext():
            callbacks.on_epoch_end(epoch, epoch_logs)
        _repair_drift(strategy, model, epoch)
        model.stop_training = consensus.any_of(strategy, bool(model.stop_training))
        if model.stop_training:
            break
    if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs.stop > 0:
        strategy.finalize_variables(model)
    callbacks.on_train_end(logs=epoch_logs)


_next_pass: Attached[int] = Attached("next_pass")  # the number of the next pass over the data, kept with the model


def _settle_seed(strategy: Strategy, callbacks: Any) -> None:
    """Chooses the seed for the order of examples, unless the user set it, and broadcasts it to all processes.

    A resumed run takes the seed of its checkpoint. Otherwise the strategy's first training derives the seed from
    Python's `random`, which the user may have seeded after creating the strategy.
    """
    seed = None
    if strategy.world.is_chief and not strategy.seed_is_given:
        resumes = [callback for callback in _unwrapped(callbacks) if hasattr(callback, "seed_to_resume_with")]
        seeds = (callback.seed_to_resume_with() for callback in resumes)
        seed = next((seed for seed in seeds if seed is not None), None)
        if seed is None and not strategy.seed_is_settled:
            seed = seed_of_random()
    seed = consensus.broadcast_from_chief(strategy, seed)
    if seed is not None:
        strategy.seed, strategy.seed_is_settled = seed, True


def _start_together(strategy: Strategy, model: Any, callbacks: Any, initial_epoch: int) -> tuple[int, int | None, int]:
    """Broadcasts the chief's variables, and returns the chief's epoch, batch and pass to start with.

    Only the chief reads checkpoints. The batch is `None` unless a callback resumes a run within an epoch.
    """
    batches = [getattr(callback, "resume_batch", None) for callback in callbacks.callbacks]
    resume_batch = max((batch for batch in batches if batch is not None), default=None)
    building.broadcast(strategy, model)
    start = (keras_internals.initial_epoch(model) or initial_epoch, resume_batch, _next_pass.get(model) or 0)
    return tuple(consensus.broadcast_from_chief(strategy, start))


def _repair_drift(strategy: Any, model: Any, epoch: int) -> None:
    """Warns and broadcasts the chief's variables if the variables of the processes differ at the end of an `epoch`."""
    if not strategy.as_one_device or strategy.mesh is None or strategy.world.world_size == 1:
        return
    groups = training_state.variables(model)
    variables = [variable for variable in (*groups["model"], *groups["optimizer"]) if parts.part_of(variable) is None]
    if not differ(variables, strategy, "compares the weights of an epoch"):
        return
    checksums = [checksum([variable]) for variable in variables]
    gathered = consensus.all_gather_object(strategy, checksums, "finds the weights that differ")
    different = [variable.path for variable, *sums in zip(variables, *gathered, strict=True) if len(set(sums)) > 1]
    strategy.broadcast_variables(variables)
    if strategy.world.is_chief:
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        warnings.warn(
            f"The processes of the job ended epoch {epoch + 1} with different values of `{different[0]}`{others}; all "
            "continue with the chief's values\n\n"
            "hint: a callback that changes a variable, such as the learning rate, must do so in every process",
            DifferenceWarning,
            stacklevel=2,
        )


def evaluate(
    strategy: Strategy,
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    _use_cached_eval_dataset: bool = False,
) -> Any:
    """Computes the loss and metrics of `model` over every example once; see `keras.Model.evaluate`.

    `_use_cached_eval_dataset`, which only `fit` sets, evaluates on the validation data of that `fit`.
    """
    check(strategy, model, "evaluate")
    steps, batch_size = _limited("steps", steps), _size("batch_size", batch_size)
    feed = (
        keras_routes.validation_feed(model)
        if _use_cached_eval_dataset
        else feed_of(strategy, adapters.request(x, y, sample_weight, batch_size=batch_size, steps=steps, passes=True))
    )
    with DataPasses(feed, steps) as passes:
        callbacks = _callback_list(strategy, model, callbacks, verbose, passes, epochs=1)
        runner = EpochRunner(strategy, model, "test", passes, callbacks)
        model.stop_evaluating = False
        passes.reset()
        callbacks.on_test_begin()
        metrics.reset(strategy, model)
        logs = keras_internals.pythonify_logs(runner.run(0))
        passes.close()
        callbacks.on_test_end(logs)
    return logs if return_dict else keras_internals.in_order_of_metrics(model, logs)


def predict(
    strategy: Strategy,
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """Returns the outputs of `model`, one per example, in the order of the input; see `keras.Model.predict`."""
    strategy.check(model)
    _check_divisible(strategy, model)
    steps, batch_size = _limited("steps", steps), _size("batch_size", batch_size)
    feed = feed_of(strategy, adapters.request(x, batch_size=batch_size, steps=steps, passes=True), for_prediction=True)
    outputs: list[Any] = []
    with DataPasses(feed, steps) as passes:
        callbacks = _callback_list(strategy, model, callbacks, verbose, passes, epochs=1)
        runner = EpochRunner(
            strategy, model, "predict", passes, callbacks, lambda logs: outputs.append(logs["outputs"])
        )
        model.stop_predicting = False
        callbacks.on_predict_begin()
        runner.run(0)
        passes.close()
        callbacks.on_predict_end()
    joined = tree.map_structure_up_to(outputs[0], lambda *parts: keras_internals.concatenate(list(parts)), *outputs)
    return tree.map_structure(keras_internals.to_numpy, joined)


def train_on_batch(
    strategy: Strategy,
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """Trains on a global batch, which every process passes whole; see `keras.Model.train_on_batch`."""
    check(strategy, model, "train_on_batch")
    if class_weight is not None:
        if sample_weight is not None:
            raise UsageError("Both `sample_weight` and `class_weight` are set", "set only one of them")
        sample_weight = keras_data.class_weight_to_sample_weights(y, class_weight)
    logs = _step_on_batch(strategy, model, "train", (x, y, sample_weight))
    return logs if return_dict else keras_internals.in_order_of_metrics(model, logs)


def test_on_batch(
    strategy: Strategy, model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
) -> Any:
    """Computes the loss and metrics of a global batch; see `keras.Model.test_on_batch`."""
    check(strategy, model, "test_on_batch")
    logs = _step_on_batch(strategy, model, "test", (x, y, sample_weight))
    return logs if return_dict else keras_internals.in_order_of_metrics(model, logs)


def predict_on_batch(strategy: Strategy, model: keras.Model, x: Any) -> Any:
    """Returns the outputs of `model` for a global batch; see `keras.Model.predict_on_batch`."""
    strategy.check(model)
    feed = BatchFeed((x,))
    outcome = programs.program(strategy, model, "predict", feed).run(feed.start(0, 0), 0, 1)
    return tree.map_structure(keras_internals.to_numpy, outcome.logs["outputs"])


def _step_on_batch(strategy: Strategy, model: Any, kind: str, data: Any) -> Logs:
    feed = BatchFeed(data)
    is_first = not programs.any_made(model, kind)
    program = programs.program(strategy, model, kind, feed)
    if is_first and kind == "train":
        building.broadcast(strategy, model)
    model.reset_metrics()
    program.begin_epoch()
    logs = program.run(feed.start(0, 0), 0, 1).logs
    program.end_epoch()
    return keras_internals.pythonify_logs(logs)


class EpochRunner:
    """Runs the epochs of a `fit`, an `evaluate` or a `predict`.

    Args:
        strategy: the strategy that runs the steps.
        model: a compiled and built model.
        kind: "train", "test" or "predict".
        passes: the data.
        callbacks: a `keras.callbacks.CallbackList`.
        on_call: called with the logs of each call of the inner loop, before the hooks.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: Any,
        kind: str,
        passes: DataPasses,
        callbacks: Any,
        on_call: Callable[[Logs], None] = lambda logs: None,
    ):
        self._strategy = strategy
        self._model = model
        self._kind = kind
        self._passes = passes
        self._callbacks = callbacks
        self._on_call = on_call
        self._program = self._current_program()
        self._steps_per_execution = model.steps_per_execution
        self._pace = steps_per_call.Pace(
            callbacks.callbacks, kind, self._steps_per_execution, self._steps_at_most(), strategy.seconds_per_call
        )
        self._done = 0  # the number of finished steps of the epoch
        self._total: int | None = None  # the number of its steps, if known
        self._data_ended = False
        self._logs: Logs = {}

    def run(self, first: int) -> Logs:
        """Runs one epoch, beginning with step number `first`; returns its logs."""
        self._begin(first)
        # As in Keras, one call runs even if a callback has requested a stop before the epoch.
        count = self._steps_per_execution if self._stop_wanted else self._pace.steps(first)
        count, stop = self._coordinate(count, stop=False)
        while not (stop or self._ended):
            self._call(count)
            count, stop = self._coordinate(self._pace.steps(self._done), self._stop_wanted)
            setattr(self._model, STOPS[self._kind], stop)
        self._passes.end_epoch(self._done - first, self._data_ended, stop)
        if first and self._done == first:  # resumed after the last step of the epoch
            self._logs = metrics.results(self._strategy, self._model)
        return self._logs | self._program.end_epoch()

    def _begin(self, first: int) -> None:
        self._program = self._current_program()
        self._program.begin_epoch()
        remaining = self._passes.begin_epoch()
        ends = [self._passes.num_batches, None if remaining is None else first + remaining]
        self._total = min((end for end in ends if end is not None), default=None)
        self._done, self._data_ended, self._logs = first, remaining == 0, {}

    def _call(self, count: int) -> None:
        count = count if self._total is None else min(count, self._total - self._done)
        getattr(self._callbacks, f"on_{self._kind}_batch_begin")(self._done)
        self._renew_program()
        began = time.perf_counter()
        with self._passes.feed.naming_bad_examples(self._passes.position, count):
            outcome = self._program.run(self._passes.state, self._passes.position, count)
        self._pace.ran(outcome.steps, time.perf_counter() - began)
        self._done += outcome.steps
        self._passes.position += outcome.steps
        self._data_ended = outcome.data_ended or self._passes.position == self._passes.feed.num_batches
        if outcome.steps:
            self._logs = outcome.logs
            self._on_call(self._logs)
            getattr(self._callbacks, f"on_{self._kind}_batch_end")(self._last_batch(), self._logs)

    def _last_batch(self) -> int:
        """Returns the batch number for `on_..._batch_end`."""
        if not self._ended:
            return self._done - 1
        # Keras numbers the last call of an epoch as if it had all `steps_per_execution` steps.
        return math.ceil(self._done / self._steps_per_execution) * self._steps_per_execution - 1

    def _renew_program(self) -> None:
        """Switches to another program if a callback has compiled the model or changed which layers are trainable."""
        current = self._current_program()
        if current is not self._program:
            self._program.end_epoch()
            self._program = current
            current.begin_epoch()

    def _current_program(self) -> Program:
        return programs.program(self._strategy, self._model, self._kind, self._passes.feed, self._callbacks.callbacks)

    @property
    def _ended(self) -> bool:
        return self._data_ended or (self._total is not None and self._done >= self._total)

    @property
    def _stop_wanted(self) -> bool:
        return bool(getattr(self._model, STOPS[self._kind]))

    def _coordinate(self, steps: int, stop: bool) -> tuple[int, bool]:
        """Agrees on the steps of the next call, and on stopping, with the processes that share these data."""
        if self._passes.feed.batches.local:
            return steps, stop
        return self._strategy.coordinate(steps, stop)

    def _steps_at_most(self) -> int | None:
        """Returns the largest number of steps per call; `None` if only the step time limits it."""
        # The inner loop checks Keras' own loss for NaN; the loss of a custom step appears only in the logs of a call.
        own_step = self._kind == "train" and keras_internals.has_own_step(self._model, "train")
        unwatched = own_step and steps_per_call.at_nan(self._callbacks.callbacks) is not AtNan.NOTHING
        # The outputs of each call are copied to the host, and an eager loop gains nothing from long calls.
        if self._kind == "predict" or self._model.run_eagerly or unwatched:
            return int(self._model.steps_per_execution)
        return self._strategy.steps_per_call


def feed_of(strategy: Strategy, request: adapters.Request, *, for_prediction: bool = False) -> Feed:
    """Returns the feed of the user's data for the strategy's devices.

    The processes of a job check that their data are equal, or join them if each process has its own part.
    """
    feed = adapters.make(request, strategy.seed, strategy.world)
    if strategy.world.world_size > 1:
        if request.per_process:
            if strategy.speeds is not None:
                raise UsageError(
                    "`speeds` is set, and each process brings its own part of the data, which is not divided",
                    "give each process a number of examples in proportion to its speed, or the whole data",
                )
            return job_feeds.local(feed, strategy.world) if for_prediction else job_feeds.JoinedFeed(feed, strategy)
        feed = job_feeds.shared(feed, strategy)
    return strategy.placed(feed)


def check(strategy: Strategy, model: Any, method: str) -> None:
    """Raises `UsageError` if the model is not compiled, or was not created for this strategy."""
    if not model.compiled:
        raise UsageError(
            f"The model `{model.name}` is not compiled, and `{method}` needs its loss and metrics",
            "call `model.compile(optimizer=..., loss=...)` first",
        )
    strategy.check(model)
    _check_divisible(strategy, model)


def _check_divisible(strategy: Strategy, model: Any) -> None:
    size = keras_internals.fixed_batch_size(model)
    if size is not None and strategy.num_replicas > 1 and not (strategy.mesh and strategy.as_one_device):
        raise UsageError(
            f"The model `{model.name}` has a fixed batch size of {size}, and each of {strategy.num_replicas} replicas "
            "gets a part of the batch",
            "leave the batch size out of the model's inputs (`shape`, not `batch_shape`), or train on one device",
        )


def _unwrapped(callbacks: Any) -> list[Any]:
    """Returns the callbacks of a list or a `CallbackList`, and the callbacks that they wrap."""
    listed = getattr(callbacks, "callbacks", None) or tree.flatten(callbacks)
    return list(keras_patches.with_wrapped(callback for callback in listed if callback is not None))


def _whole(name: str, number: Any) -> int:
    """`number`, which may also be NumPy's, as an `int`: TensorFlow counts in 32 bits, and NumPy in 64."""
    try:
        return operator.index(number)
    except TypeError:
        raise UsageError(
            f"`{name}` is {number!r}, which is no whole number", f"use a whole number, such as `{name}=2`"
        ) from None


def _size(name: str, number: Any) -> int | None:
    """A number of examples or steps; `None` if the user did not set it."""
    if number is None:
        return None
    size = _whole(name, number)
    if size < 0:
        raise UsageError(f"`{name}` is {size}", "use 1 or more, or leave it out")
    return size


def _limited(name: str, number: Any) -> int | None:
    """The steps, at most Keras' maximum number of steps per epoch (`keras.config.set_max_steps_per_epoch`)."""
    steps = _size(name, number)
    cap = keras_internals.max_steps_per_epoch()
    return min(steps or cap, cap) if cap else steps


def _callback_list(
    strategy: Strategy,
    model: Any,
    callbacks: Any,
    verbose: Any,
    passes: DataPasses,
    *,
    epochs: int,
    add_history: bool = False,
) -> Any:
    unwrapped = _unwrapped(callbacks)
    strategy.check_callbacks(unwrapped)
    # All processes must know this, since they gather the variables that the chief's callback saves.
    saves = any(isinstance(callback, keras.callbacks.ModelCheckpoint) for callback in unwrapped)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.saves_models = saves
        return callbacks
    if not strategy.world.is_chief:
        verbose = 0
        callbacks = [c for c in tree.flatten(callbacks) if c is not None and not isinstance(c, WRITERS)]
    callback_list = keras.callbacks.CallbackList(
        callbacks,
        add_history=add_history,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=epochs,
        steps=passes.num_batches,
        examples=passes.examples,
        model=model,
    )
    callback_list.saves_models = saves
    for callback in keras_patches.with_wrapped(callback_list.callbacks):
        if hasattr(callback, "set_training"):
            callback.set_training(strategy, passes)
    return callback_list
