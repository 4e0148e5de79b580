"""One training run of `tfdist train`, from its config to its record. Importing this module imports TensorFlow.

A run warns of probable mistakes in a user's model or dataset, one sentence each:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    >>> model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> mistake_in_loss(model)
    'The model ends in probabilities (softmax), and its loss expects logits (`from_logits=True`): leave the softmax out'
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist import callbacks, data, files, models, tasks, terminal
from tfdist.callbacks import memory
from tfdist.checkpointing import evaluation
from tfdist.data.formats import text
from tfdist.data.tools import for_model
from tfdist.errors import UsageError
from tfdist.internals import keras as keras_internals
from tfdist.internals.tensorflow import runtime_started
from tfdist.jobs import consensus
from tfdist.profiling import trace
from tfdist.run import evaluator, optimizers, recorder, schema, trackers, utilization
from tfdist.run.config import TrainConfig
from tfdist.run.folder import RunFolder, load_record, optional, writing
from tfdist.run.recorder import Recorder, begin_record
from tfdist.run.schema import RunRecord
from tfdist.verification.bounds import BoundReport

# On a CPU, a step with few FLOPs is faster with one thread per operation than with all cores, because waking the other
# threads takes longer than the work. Measured on four cores: `mlp` at batch 32 takes 0.48 ms per step on one thread and
# 0.78 ms on four; `cnn` at batch 128 takes 33 ms on one and 17 ms on four. Both take the same time between `mlp` at
# batch 128 (78 million) and `lenet` at batch 32 (92 million).
SMALL_STEP_OPERATIONS = 85_000_000
# Layers that scale or normalize their input.
_SCALING = (
    keras.layers.Rescaling,
    keras.layers.Normalization,
    keras.layers.BatchNormalization,
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
)
_PROBABILITIES = ("softmax", "sigmoid")


def step_is_small(model: str, spec: Any, batch_size: int, options: Mapping[str, Any] | None = None) -> bool:
    """Whether a training step of the model named `model` is faster on one CPU thread than on all cores."""
    return step_operations(model, spec, batch_size, options) < SMALL_STEP_OPERATIONS


def step_operations(model: str, spec: Any, batch_size: int, options: Mapping[str, Any] | None = None) -> float:
    """Returns the FLOPs of the matrix products of a training step; the backward pass counts as two forward passes.

    Infinite if unknown, for a model whose layers are not all built and connected, such as a subclassed model.
    """
    with tf.Graph().as_default():  # variables in a separate graph do not initialize TensorFlow's devices
        built = models.build(model, spec, **options or {})
        layers = [layer for layer in keras_internals.all_layers(built) if not isinstance(layer, keras.Model)]
        known = all(layer.built and keras_internals.is_connected(layer) for layer in layers)
        length = 1 if spec.vocabulary_size == 0 else spec.input_shape[0]
        forward = sum(_operations(layer, length) for layer in layers) if known else math.inf
    keras.backend.clear_session()  # makes the names of the layers available again
    return 3 * batch_size * forward


def _operations(layer: Any, length: int) -> int:
    """Forward FLOPs per example: 2 x kernel size x output positions.

    A recurrent layer computes a state at each of the `length` positions of its input, even if it returns only the last.
    """
    kernels = [weight for weight in layer.trainable_weights if len(weight.shape) >= 2]
    if not kernels or isinstance(layer, keras.layers.Embedding):  # an embedding is a lookup, not a product
        return 0
    output = keras.tree.flatten(layer.output)[0]
    recurrent = isinstance(layer, keras.layers.RNN | keras.layers.Bidirectional)
    positions = length if recurrent else math.prod(size or length for size in output.shape[1:-1])
    return sum(2 * math.prod(kernel.shape) * positions for kernel in kernels)


def vocabularies(source: data.Source) -> dict[str, list[str]]:
    """The vocabularies of the dataset by name: lists of words in the order of their IDs."""
    tokens = {name: list(getattr(source.spec, name)) for name in ("vocabulary", "target_vocabulary")}
    return {name: words for name, words in tokens.items() if words}


def write_vocabularies(folder: RunFolder, strategy: Any, source: data.Source) -> None:
    """Writes the vocabularies to the run folder.

    Raises:
        TfdistError: another process, or the run that is resumed, has a different vocabulary.
    """
    words = vocabularies(source)
    if not words:
        return
    if strategy.world.world_size > 1:
        facts = {name: consensus.fingerprint(tokens) for name, tokens in words.items()}
        splits = [split for split in data.SPLITS if source.spec.examples[split]]
        facts |= {f"the words of `{split}`": _fingerprint(source, split) for split in splits}
        consensus.require_equal(strategy, facts)
    if strategy.world.is_chief:
        with writing(folder.path):
            for name, tokens in words.items():
                text.keep_vocabulary(getattr(folder, name), tokens)


def _fingerprint(source: data.Source, split: str) -> str:
    x, y = source.arrays(split)
    return consensus.fingerprint_of_arrays([*(x.values() if isinstance(x, dict) else [x]), y])


class Session:
    """A training run that can be closed at any time; its record then shows how far the run got.

    Args:
        config: the options of the run.
        folder: the folder of its files.
        command: the command and its options, for the record.
        typed: the command line as the user typed it.
        started: the time when the process started.
        show: prints a line for the user.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        command: list[str],
        typed: str,
        started: datetime,
        show: Callable[..., None],
    ):
        self.config = config
        self.folder = folder
        self.record: RunRecord | None = None
        self.data_touched = time.monotonic()  # set again when the dataset is read
        self.tokens_per_example: float | None = None
        self.command = command
        self.typed = typed
        self.started = started
        self._show = show
        self.tracker: trackers.Guarded | None = None
        self._profile: callbacks.Profile | None = None
        self._interrupted = False
        self._task_files: dict[str, str] = {}
        self._peak_memory_bytes: int | None = None  # that of the training, once it has ended
        self.usage: list[tuple[str, str]] = []  # rows of the final table: how to use the saved model

    def interrupt(self) -> None:
        """Makes the run end with `KeyboardInterrupt`, at the latest after the current steps."""
        self._interrupted = True

    def raise_if_interrupted(self) -> None:
        """Raises `KeyboardInterrupt` if `interrupt` was called."""
        if self._interrupted:
            raise KeyboardInterrupt

    def run(self) -> RunRecord:
        """Trains, evaluates and saves the model, and returns the final record."""
        config = self.config
        earlier = load_record(self.folder.run_dir) if config.resume and self.folder.run_json.exists() else None
        if earlier is not None:
            recorder.check_resumed(config, earlier)
            self._warn(recorder.resume_warning(config, earlier))
        strategy, source, model, train = self._build()
        self.tokens_per_example = source.tokens_per_example("train")
        self.record = begin_record(self, strategy, model, source, earlier)
        self.write_record()
        self._begin_tracking()
        write_vocabularies(self.folder, strategy, source)
        self._report_skipped(source)
        strategy.fit(
            model,
            train,
            epochs=config.epochs,
            validation_data=self._feed(strategy, source, "validation") if source.spec.examples["validation"] else None,
            callbacks=self._callbacks(strategy),
            verbose=0 if config.quiet else "auto",
        )
        self.record.strategy.stages = [schema.StageRecord(**stage) for stage in strategy.stages_of(model)]
        if source.spec.examples["test"]:
            self.record.test_metrics = strategy.evaluate(
                model, self._feed(strategy, source, "test"), return_dict=True, verbose=0
            )
        with strategy.whole_state(model):
            if strategy.world.is_chief:
                with writing(self.folder.path):
                    files.write_atomically(self.folder.model, model.save)
        if strategy.world.is_chief:
            self.usage = recorder.rows(model, source, config.dataset, self.folder.model)
        self._show_task(model, source, strategy)
        if self._profile is not None and self._profile.traced and strategy.world.is_chief:
            self._write_profile()
        if strategy.world.is_chief:
            self._record_utilization(source, strategy)
        if model.stop_training:
            self.close("stopped", f"validation accuracy reached {config.target_accuracy}")
        else:
            self.close("completed", None)
        if self._profile is not None and self._profile.untraced is not None:
            raise UsageError(self._profile.untraced, "profile earlier steps in a new run with `--profile`")
        return self.record

    def _record_utilization(self, source: data.Source, strategy: Any) -> None:
        assert self.record is not None
        self._peak_memory_bytes = memory.peak_resident_bytes()  # without what is traced here
        try:
            self.record.utilization = utilization.of_run(self.record, self.config, self.model_options, source, strategy)
        except Exception as error:  # the user's code that builds the model; the training has ended well
            self._warn(f"The FLOPs of a step are not counted, since building the model again failed: {error}")

    def evaluate_checkpoints(self) -> None:
        """Evaluates the checkpoints of a training that runs in other processes, until it has ended.

        Raises:
            ClusterError: the training has failed, has not begun, or seems to be dead.
        """
        config, follower = self.config, self.folder.follower
        assert follower is not None
        strategy, source, model, _ = self._build()
        split = next((name for name in ("validation", "test") if source.spec.examples[name]), None)
        if split is None:
            raise UsageError(
                f"The dataset `{config.dataset}` has no examples for validation or test, and this process evaluates",
                "leave the evaluator out",
            )
        feed = self._feed(strategy, source, split)
        history = evaluation.History(self.folder.history, self.folder.tensorboard / self.folder.path.name)
        training = evaluator.Training(self.folder, history, config.resume)

        def ended(waited: float) -> bool:
            self.raise_if_interrupted()
            return training.ended(waited)

        evaluation.evaluate_each(
            model,
            follower,
            lambda: strategy.evaluate(model, feed, return_dict=True, verbose=0),
            history,
            ended,
            resumed=config.resume,
            prefix="val_" if split == "validation" else "test_",
            show=self._show,
        )

    def verify(self) -> None:
        """Compares the first steps with one device, and shows the differences.

        Raises:
            VerificationError: the differences are larger than rounding errors.
        """
        assert self.config.verify_steps is not None
        strategy, _, model, train = self._build()
        report = strategy.verify(model, train, steps=self.config.verify_steps)
        equality = None if strategy.bound is None or isinstance(report, BoundReport) else strategy.bound.equality
        bound = "" if equality is None else f" Its bound is: {equality}."
        # The verdict is below the table, at the end of the terminal's output.
        self._show(f"{report.table}\n\n{report.verdict}{bound}")

    def _build(self) -> tuple[Any, data.Source, Any, Any]:
        """Returns the strategy, the dataset, the compiled model and the training batches."""
        config = self.config
        strategy, source = self._strategy_and_source()
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.dtype_policy)
        train = self._training_feed(strategy, source)
        with strategy.scope():
            model = models.build(config.model, source.spec, **self.model_options)
            compiled = model.compiled
            if not compiled:
                optimizers.compile(model, source.spec, config, train.num_batches)
                if (sentence := optimizers.scaling(config, train.num_batches)) is not None:
                    self._show(sentence)
        if ":" in config.model or ":" in config.dataset:  # the user's own code
            self._warn_of_mistakes(model, source, compiled)
        return strategy, source, model, train

    def _training_feed(self, strategy: Any, source: data.Source) -> Any:
        config = self.config
        if config.input == "synthetic":
            return source.repeated_feed("train", config.batch_size, augment=config.augment, **self._feed_options())
        if config.input == "cached":
            source = source.cached()
        return self._feed(strategy, source, "train", augment=config.augment)

    def _feed(self, strategy: Any, source: data.Source, split: str, **options: Any) -> Any:
        shuffle = models.shuffles(self.config.model, split)
        options = {**self._feed_options(), "shuffle": shuffle, **options}
        return source.feed(split, self.config.batch_size, world=strategy.world, **options)

    def _feed_options(self) -> dict[str, Any]:
        streams = {"stream_positions": True} if _has_streams(self.config) else {}
        return {"seed": self.config.seed, **streams}

    def close(self, status: schema.Status, reason: str | None) -> None:
        """Ends an open trace, and writes the record with the final status of the run."""
        if self._profile is not None:
            self._profile.close()
        if self.record is None:
            return
        self.record.status, self.record.reason = status, reason
        self.record.peak_memory_bytes = self._peak_memory_bytes or memory.peak_resident_bytes()
        self.record.peak_gpu_memory_bytes = memory.peak_gpu_bytes()
        self.record.files = self._files()
        self.write_record()
        if self.folder.is_chief:
            self.folder.write_history(self.record)
            self.folder.draw_curves(self.record)
        if self.tracker is not None:
            self.tracker.end(status, self.folder.path)

    def _begin_tracking(self) -> None:
        """Begins the run in the tracker, if the user has chosen one and this process is the chief."""
        name, record = self.config.tracker, self.record
        if name is not None and record is not None and self.folder.is_chief:
            self.tracker = trackers.Guarded(name, lambda: trackers.begin(name, record, self.folder.path))

    def write_record(self) -> None:
        """Writes the record, if this process is the chief."""
        if self.folder.is_chief and self.record is not None:
            self.folder.write(self.record)

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of the model; a stateful model has one stream per example of a global batch."""
        streams = {"streams": self.config.batch_size} if _has_streams(self.config) else {}
        return streams | dict(self.config.model_options)

    def _strategy_and_source(self) -> tuple[Any, data.Source]:
        """Creates the strategy and loads the dataset.

        The strategy is created first if possible, because the user's dataset may initialize TensorFlow.
        """
        config = self.config
        if _may_use_one_thread(config):
            source = self._load()
            return self._strategy(source), source
        strategy = self._strategy(None)
        builds_vocabulary = data.knows(config.dataset, "vocabulary") and "vocabulary" not in config.load_options
        if config.traits.processes and builds_vocabulary:
            return strategy, self._load_with_chief_vocabulary(strategy)
        return strategy, self._load()

    def _load(self, **options: Any) -> data.Source:
        config = self.config
        self.data_touched = time.monotonic()
        source = for_model.load(config.model, config.dataset, config.data_dir, **config.load_options, **options)
        return source if config.limit is None else source.limit(config.limit)

    def _load_with_chief_vocabulary(self, strategy: Any) -> data.Source:
        """The chief builds the vocabulary; the other processes receive it, write it to their run folder, and use it."""
        source = self._load() if strategy.world.is_chief else None
        words = consensus.broadcast_from_chief(strategy, {} if source is None else vocabularies(source))
        if source is not None:
            return source
        paths = {name: getattr(self.folder, name) for name in words if data.knows(self.config.dataset, name)}
        with writing(self.folder.path):
            for name, path in paths.items():
                text.write_vocabulary(path, words[name])
        return self._load(**{name: str(path) for name, path in paths.items()})

    def _strategy(self, source: data.Source | None) -> Any:
        """Creates the strategy; `single` and `custom` on one device use one thread if a step on `source` is small."""
        config = self.config
        options: dict[str, Any] = {}
        configurable = not runtime_started()  # else the user's own code has fixed devices and threads
        if config.strategy == "single" and configurable:
            options["exclusive"] = True
        if (
            configurable
            and source is not None
            and not tf.config.get_visible_devices("GPU")
            and _may_use_one_thread(config)
            and step_is_small(config.model, source.spec, config.batch_size, self.model_options)
        ):
            options["threads"] = 1
        if config.traits.processes:
            options["job_settings"] = _job_settings(config)
        options |= config.strategy_options
        strategy = tfdist.strategy(config.strategy, devices=config.devices, seed=config.seed, **options)
        if config.devices is None and strategy.devices[0].startswith("CPU") and not strategy.one_device:
            count = len(strategy.devices)
            devices = "1 CPU device" if count == 1 else f"{count} logical CPU devices"
            hint = " per process" if config.traits.processes else "; `--devices N` sets another number"
            self._show(f"No GPU found: `{config.strategy}` uses {devices}{hint}.")
        return strategy

    def _report_skipped(self, source: data.Source) -> None:
        count = len(source.skipped)
        if count:
            are, them = ("is", "it") if count == 1 else ("are", "them")
            self._show(f"{terminal.counted(count, 'bad example')} {are} left out; the log names {them}.")
            print(*source.skipped, sep="\n", file=sys.stderr)

    def _warn_of_mistakes(self, model: Any, source: data.Source, compiled: bool) -> None:
        """Warns of probable mistakes in the user's own model or dataset, and of options without effect."""
        for name in ("optimizer", "learning_rate", "momentum", "weight_decay") if compiled else ():
            if getattr(self.config, name) is not None:
                self._warn(f"The model is compiled already, and `--{name.replace('_', '-')}` has no effect")
        for sentence in (mistake_in_loss(model), mistake_in_pixels(model, source)):
            self._warn(sentence)

    def _warn(self, sentence: str | None) -> None:
        if sentence is not None:
            self._show(f"warning: {sentence}.")

    def _callbacks(self, strategy: Any) -> list[Any]:
        config = self.config
        checkpoint = callbacks.Checkpoint(
            self.folder.checkpoints,
            every_steps=config.checkpoint_steps,
            resume=config.resume,
            run=self._facts(),
        )
        throughput = callbacks.Throughput()
        result: list[Any] = [checkpoint, throughput, callbacks.StopAtNonFiniteLoss(checkpoint)]
        timer = None
        if config.target_accuracy is not None:
            timer = callbacks.TimeToTarget(config.target_accuracy)
            result.append(timer)
        if config.tensorboard:
            board = keras.callbacks.TensorBoard(str(self.folder.tensorboard))
            result.append(_that_may_fail(board, self.folder.tensorboard))
        if config.profile is not None:
            self._profile = callbacks.Profile(*config.profile, self.folder.tensorboard)
            result.append(self._profile)
        return [*result, Recorder(self, strategy, throughput, timer)]

    def _facts(self) -> dict[str, int | str]:
        """The facts that identify the run, which a checkpoint of the run must have."""
        config = self.config
        assert self.record is not None
        facts: dict[str, int | str] = {"seed": config.seed, "model": config.model, "dataset": config.dataset}
        if config.resume and self.record.started == self.started:
            return facts  # the record of the run that is resumed, with its start, is missing
        return facts | {"start": self.record.started.isoformat()}

    def _files(self) -> dict[str, str]:
        names = ("history", "curves", "log", "vocabulary", "target_vocabulary", "profile", "tensorboard", "checkpoints")
        paths = {name: getattr(self.folder, name) for name in (*names, "model")}
        # These are written after the record.
        written = {"history", "curves"} if self.record is not None and self.record.epochs else {"history"}
        return {name: path.name for name, path in paths.items() if name in written or path.exists()} | self._task_files

    def _show_task(self, model: Any, source: Any, strategy: Any) -> None:
        """Writes the task's example outputs to the run folder, and adds its scores to the record."""
        assert self.record is not None
        run = tasks.Run(model, source, strategy, self.folder.path, self.config.batch_size, self.config.seed)
        with optional(self.folder.path):
            tasks.show(run)
        self._warn(run.skipped)
        self._task_files = {name: file for name, file in run.files.items() if (self.folder.path / file).exists()}
        if run.scores:
            self.record.test_metrics = {**(self.record.test_metrics or {}), **run.scores}

    def _write_profile(self) -> None:
        summary = trace.summarize(self.folder.tensorboard)
        profile = trace.as_text(summary)
        assert self.record is not None
        if summary.breakdown is not None:
            self.record.breakdown = schema.BreakdownRecord(**dataclasses.asdict(summary.breakdown))
        if summary.stages is not None:
            strategy = self.record.strategy
            for stage, seconds in zip(strategy.stages, summary.stages.seconds, strict=False):
                stage.busy_seconds = seconds
            strategy.bubble, strategy.even_bubble = summary.stages.bubble, summary.stages.even_bubble
        with optional(self.folder.profile):
            files.write_text(self.folder.profile, profile + "\n")
        self._show(profile)


def mistake_in_loss(model: keras.Model) -> str | None:
    """Returns a warning if a model outputs probabilities and its loss expects logits, or vice versa; else `None`."""
    expects_logits = _expects_logits(model.loss)
    ending = _ending(model)
    if expects_logits is None or ending is None:
        return None
    if expects_logits and ending in _PROBABILITIES:
        return (
            f"The model ends in probabilities ({ending}), and its loss expects logits (`from_logits=True`): "
            f"leave the {ending} out"
        )
    if not expects_logits and ending == "linear":
        return (
            "The model ends without an activation, and its loss expects probabilities: compile it with a loss that has "
            "`from_logits=True`"
        )
    return None


def mistake_in_pixels(model: keras.Model, source: data.Source) -> str | None:
    """Returns a warning if the model certainly gets pixels from 0 to 255 and does not scale them; else `None`."""
    layers = keras_internals.all_layers(model)
    scales = any(isinstance(layer, _SCALING) for layer in layers)
    # A layer of the user's may scale in its own code.
    if not source.has_bytes or scales or not all(keras_internals.is_of_keras(type(layer)) for layer in layers):
        return None
    return (
        f"The examples of `{source.spec.name}` are whole numbers up to 255 (uint8), and nothing scales them: "
        "divide them by 255, or begin the model with `keras.layers.Rescaling(1 / 255)`"
    )


def _expects_logits(loss: Any) -> bool | None:
    """Whether a loss expects logits; `None` if it takes neither logits nor probabilities, or is not part of Keras."""
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if inspect.isfunction(loss) and loss.__module__.startswith("keras."):
        return False if "from_logits" in inspect.signature(loss).parameters else None
    if not (isinstance(loss, keras.losses.Loss) and keras_internals.is_of_keras(type(loss))):
        return None
    expects: bool | None = loss.get_config().get("from_logits")
    return expects


def _ending(model: keras.Model) -> str | None:
    """The activation of the model's output: "softmax", "sigmoid" or "linear"; `None` for anything else."""
    last = keras_internals.last_operation(model)
    kind = type(last).__name__.lower()  # `keras.layers.Softmax`, or the operation of `keras.ops.softmax`
    if kind in _PROBABILITIES:
        return kind
    name = getattr(getattr(last, "activation", None), "__name__", None)
    has_kernel = isinstance(last, keras.layers.Dense | keras.layers.Conv2D)
    return name if name in _PROBABILITIES or (name == "linear" and has_kernel) else None


def _that_may_fail(callback: keras.callbacks.Callback, path: Path) -> keras.callbacks.Callback:
    """The callback, which is switched off with a warning if it cannot write to `path`.

    Its methods are replaced, not its class, since the loop chooses its steps per call by the classes of callbacks.
    """
    is_on = True

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*arguments: Any, **named: Any) -> None:
            nonlocal is_on
            if is_on:
                is_on = False
                with optional(path, tf.errors.OpError):
                    hook(*arguments, **named)
                    is_on = True

        return call

    for name in ("set_model", *(name for name in dir(callback) if name.startswith("on_"))):
        if getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name, None):
            setattr(callback, name, guarded(getattr(callback, name)))
    return callback


def _may_use_one_thread(config: TrainConfig) -> bool:
    return config.strategy in ("single", "custom") and config.devices in (None, 1)


def _has_streams(config: TrainConfig) -> bool:
    """Whether the model is stateful, with one stream of examples per row of a batch."""
    return models.knows(config.model, "streams")


def _job_settings(config: TrainConfig) -> dict[str, str]:
    """The options that must be equal in all processes of a job."""
    names = (
        *("model", "dataset", "data_options", "on_bad_example", "augment", "limit", "input", "epochs", "batch_size"),
        *("model_options", "strategy_options", "optimizer", "learning_rate", "momentum", "weight_decay", "schedule"),
        *("warmup_epochs", "dtype_policy", "gradient_accumulation", "seed"),
    )
    return {"--" + name.replace("_", "-"): str(getattr(config, name)) for name in names}
