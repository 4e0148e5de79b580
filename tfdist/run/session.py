"""One training run from its config to its record: what `tfdist train` does once the options are known.

Importing this module imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist import callbacks, data, files, models, tasks, terminal
from tfdist.callbacks import memory
from tfdist.cluster import consensus
from tfdist.cluster.world import World
from tfdist.data.formats import text
from tfdist.errors import RunFolderError, UsageError
from tfdist.internals import keras as keras_internals
from tfdist.profiling import trace
from tfdist.run import advice, flops, optimizers, schema, usage
from tfdist.run.config import OF_STRATEGIES, TrainConfig
from tfdist.run.folder import RunFolder, load_record
from tfdist.run.schema import RunRecord


class Session:
    """A run that can be closed at any moment with a record that says how far it came.

    Args:
        config: what to train.
        folder: where its files go.
        command: the command and its options, for the record.
        typed: the command line as it was typed.
        started: when the process began.
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
        self._command = command
        self._typed = typed
        self._started = started
        self._show = show
        self._profile: callbacks.Profile | None = None
        self._interrupted = False
        self._shown: dict[str, str] = {}
        self.usage: list[tuple[str, str]] = []  # how the model that was saved is used

    def interrupt(self) -> None:
        """Ends the run with `KeyboardInterrupt`, after the current steps at the latest."""
        self._interrupted = True

    def raise_if_interrupted(self) -> None:
        """Raises what was asked for by `interrupt`."""
        if self._interrupted:
            raise KeyboardInterrupt

    def run(self) -> RunRecord:
        """Trains, evaluates, saves; returns the record as it is on the disk."""
        config = self.config
        earlier = load_record(self.folder.path) if config.resume and self.folder.run_json.exists() else None
        if earlier is not None:
            _refuse_other_run(config, earlier)
        if _asks_chief_for_words(config):
            strategy = self._strategy(None)
            source = self._load_with_words_of_chief(strategy)
        else:
            source = self._load()
            strategy = self._strategy(source)
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.dtype_policy)

        def feed(split: str, **options: Any) -> Any:
            if _keeps_streams(config):
                options["places"] = True
            return source.feed(split, config.batch_size, world=strategy.world, seed=config.seed, **options)

        train = feed("train", augment=config.augment)
        with strategy.scope():
            model = models.build(config.model, source.spec, **_model_options(config))
            if not model.compiled:
                tasks.compile(model, source.spec, optimizers.make(config, train.num_batches))
        if ":" in config.model or ":" in config.dataset:
            self._advise(model, source)
        self.record = self._begin_record(strategy, model, source, earlier)
        self.folder.write(self.record)
        self._keep_vocabularies(strategy, source)
        if source.skipped:
            count = len(source.skipped)
            are, them = ("is", "it") if count == 1 else ("are", "them")
            self._show(f"{terminal.counted(count, 'bad example')} {are} left out; the log names {them}.")
            print(*source.skipped, sep="\n", file=sys.stderr)

        strategy.fit(
            model,
            train,
            epochs=config.epochs,
            validation_data=feed("validation") if source.spec.examples["validation"] else None,
            callbacks=self._callbacks(strategy),
            verbose=0 if config.quiet else "auto",
        )
        if source.spec.examples["test"]:
            self.record.test_metrics = strategy.evaluate(model, feed("test"), return_dict=True, verbose=0)
        if strategy.world.is_chief:
            with _whole_run_folder(self.folder):
                files.write_whole(self.folder.model, model.save)
            self.usage = usage.rows(model, source.spec, config.dataset, self.folder.model)
        self._show_task(model, source, strategy)
        if self._profile is not None and self._profile.traced and strategy.world.is_chief:
            self._keep_profile()
        if model.stop_training:
            self.close("stopped", f"validation accuracy reached {config.target_accuracy}")
        else:
            self.close("completed", None)
        if self._profile is not None and self._profile.untraced is not None:
            raise UsageError(self._profile.untraced, "profile earlier steps with `--profile`, in a new run")
        return self.record

    def close(self, status: schema.Status, reason: str | None) -> None:
        """Ends what is open and writes the record with how the run ended."""
        if self._profile is not None:
            self._profile.close()
        if self.record is None:
            return
        self.record.status, self.record.reason = status, reason
        self.record.peak_memory_bytes = memory.peak_resident_bytes()
        self.record.peak_gpu_memory_bytes = memory.peak_gpu_bytes()
        self.record.files = self._files()
        self.folder.write(self.record)
        self.folder.write_history(self.record)
        if self.record.world.rank == 0:
            self.folder.draw_curves(self.record)

    def _load(self, **options: Any) -> data.Source:
        config = self.config
        source = data.load(config.dataset, config.data_dir, **config.load_options, **options)
        if models.tasks(config.model) == ("autoencoding",):
            source = source.for_autoencoding()
        return source if config.limit is None else source.limit(config.limit)

    def _load_with_words_of_chief(self, strategy: Any) -> data.Source:
        """The chief makes the vocabulary; the others are told it, keep it beside their run, and number words by it."""
        source = self._load() if strategy.world.is_chief else None
        of_chief = consensus.broadcast_from_chief(strategy, {} if source is None else _vocabularies(source))
        if source is not None:
            return source
        paths = {name: getattr(self.folder, name) for name in of_chief if data.knows(self.config.dataset, name)}
        with _whole_run_folder(self.folder):
            for name, path in paths.items():
                text.write_vocabulary(path, of_chief[name])
        return self._load(**{name: str(path) for name, path in paths.items()})

    def _strategy(self, source: data.Source | None) -> Any:
        """The strategy; how small a step is decides something for those of one process, which know their `source`."""
        config = self.config
        options: dict[str, Any] = {}
        if (
            source is not None
            and config.strategy in ("single", "custom")
            and config.devices in (None, 1)
            and flops.step_is_small(config.model, source.spec, config.batch_size, _model_options(config))
        ):
            options["threads"] = 1
        if config.traits.processes:
            options["job_settings"] = _job_settings(config)
        options |= {name: value for name in OF_STRATEGIES if (value := getattr(config, name)) is not None}
        options |= config.strategy_options
        strategy = tfdist.strategy(config.strategy, devices=config.devices, seed=config.seed, **options)
        if config.devices is None and strategy.devices[0].startswith("CPU") and config.strategy != "single":
            count = len(strategy.devices)
            what = "1 CPU device" if count == 1 else f"{count} logical CPU devices"
            other = " per process" if config.traits.processes else "; `--devices N` sets another number"
            self._show(f"No GPU found: `{config.strategy}` uses {what}{other}.")
        return strategy

    def _begin_record(self, strategy: Any, model: Any, source: Any, earlier: RunRecord | None) -> RunRecord:
        config = self.config
        world = strategy.world
        return RunRecord(
            command=self._command if earlier is None else _continued(earlier.command, self._command),
            typed=[*([] if earlier is None else earlier.typed), self._typed],
            started=self._started if earlier is None else earlier.started,
            machine=schema.Machine.detect([gpu.name for gpu in tf.config.list_physical_devices("GPU")]),
            threads=schema.Threads(
                intra_op=tf.config.threading.get_intra_op_parallelism_threads(),
                inter_op=tf.config.threading.get_inter_op_parallelism_threads(),
            ),
            strategy=schema.StrategyRecord(
                name=config.strategy,
                options=strategy.options(),
                # The workers of a parameter server compute at the same time, each of them a step of its own.
                replicas=getattr(strategy, "num_workers", strategy.num_replicas),
            ),
            world=schema.WorldRecord(
                rank=world.rank,
                world_size=world.world_size,
                local_rank=world.local_rank,
                local_world_size=world.local_world_size,
                source=world.source,
            ),
            model=schema.ModelRecord(
                name=config.model,
                parameters=model.count_params(),
                options={name: str(value) for name, value in _model_options(config).items()},
            ),
            dataset=schema.DatasetRecord(
                name=config.dataset,
                examples=dict(source.spec.examples),
                options={name: str(value) for name, value in config.load_options.items()},
                augment=config.augment,
                skipped=len(source.skipped),
                class_names=list(source.spec.class_names),
            ),
            global_batch_size=config.batch_size,
            per_replica_batch_size=-(-config.batch_size // strategy.num_replicas),
            seed=config.seed,
            optimizer=model.optimizer.name,
            learning_rate=_learning_rate(model.optimizer),
            dtype_policy=config.dtype_policy,
            epochs=[] if earlier is None else list(earlier.epochs),
            startup_seconds=None if earlier is None else earlier.startup_seconds,
        )

    def _keep_vocabularies(self, strategy: Any, source: data.Source) -> None:
        """The words by number are beside the run; all processes, and a run that goes on, have the same."""
        found = _vocabularies(source)
        if not found:
            return
        if strategy.world.world_size > 1:
            facts = {name: consensus.fingerprint(tokens) for name, tokens in found.items()}
            splits = [split for split in data.SPLITS if source.spec.examples[split]]
            facts |= {f"the words of `{split}`": _fingerprint_of_numbers(source, split) for split in splits}
            consensus.require_equal(strategy, facts)
        if strategy.world.is_chief:
            with _whole_run_folder(self.folder):
                for name, tokens in found.items():
                    text.keep_vocabulary(getattr(self.folder, name), tokens)

    def _advise(self, model: Any, source: data.Source) -> None:
        """Tells what is probably not meant in a model or a dataset of the user's own."""
        for sentence in advice.about(model, source):
            self._show(f"warning: {sentence}.")

    def _callbacks(self, strategy: Any) -> list[Any]:
        config = self.config
        keep = callbacks.Checkpoint(self.folder.checkpoints, every_steps=config.checkpoint_steps, resume=config.resume)
        throughput = callbacks.Throughput()
        found: list[Any] = [keep, throughput, callbacks.StopAtNonFiniteLoss(keep)]
        timer = None
        if config.target_accuracy is not None:
            timer = callbacks.TimeToTarget(config.target_accuracy)
            found.append(timer)
        if config.tensorboard:
            found.append(keras.callbacks.TensorBoard(str(self.folder.tensorboard)))
        if config.profile is not None:
            self._profile = callbacks.Profile(*config.profile, self._profile_folder(strategy.world))
            found.append(self._profile)
        return [*found, _Recorder(self, throughput, timer)]

    def _profile_folder(self, world: World) -> Path:
        """All ranks' traces are looked at together, in the chief's folder."""
        of_chief = self.folder.path if world.is_chief else self.folder.path.parent
        return RunFolder(of_chief, resume=True).tensorboard

    def _files(self) -> dict[str, str]:
        paths = {
            "history": self.folder.history,
            "curves": self.folder.curves,
            "log": self.folder.log,
            "vocabulary": self.folder.vocabulary,
            "target_vocabulary": self.folder.target_vocabulary,
            "profile": self.folder.profile,
            "tensorboard": self.folder.tensorboard,
            "checkpoints": self.folder.checkpoints,
            "model": self.folder.model,
        }
        written = {"history", "curves"} if self.record is not None and self.record.epochs else {"history"}
        return {name: path.name for name, path in paths.items() if name in written or path.exists()} | self._shown

    def _show_task(self, model: Any, source: Any, strategy: Any) -> None:
        """Leaves what the task shows in the run's folder; a model that was compiled already has another task."""
        assert self.record is not None
        run = tasks.Run(model, source, strategy, self.folder.path, self.config.batch_size, self.config.seed)
        with _whole_run_folder(self.folder):
            tasks.show(run)
        self._shown = run.files
        if run.scores:
            self.record.test_metrics = {**(self.record.test_metrics or {}), **run.scores}

    def _keep_profile(self) -> None:
        text = trace.as_text(trace.summarize(self.folder.tensorboard))
        with _whole_run_folder(self.folder):
            files.write_text(self.folder.profile, text + "\n")
        self._show(text)


class _Recorder(keras.callbacks.Callback):
    """Brings the record up to date after each epoch."""

    def __init__(self, session: Session, throughput: Any, timer: Any):
        super().__init__()
        self._session = session
        self._throughput = throughput
        self._timer = timer

    def batches_until_hook(self, batch: int) -> int | None:
        return None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        found = self._session.record
        assert found is not None
        found.epochs = [earlier for earlier in found.epochs if earlier.epoch <= epoch]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._session.raise_if_interrupted()
        found = self._session.record
        if found is not None and found.startup_seconds is None:
            found.startup_seconds = (datetime.now(UTC) - found.started).total_seconds()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        found = self._session.record
        assert found is not None
        found.epochs.append(
            schema.EpochRecord.from_logs(
                epoch + 1, logs or {}, self._throughput.train_seconds, self._throughput.evaluation_seconds
            )
        )
        found.peak_memory_bytes = memory.peak_resident_bytes()
        if self._timer is not None:
            found.time_to_target = schema.TargetRecord(
                monitor=self._timer.monitor,
                target=self._timer.target,
                seconds=self._timer.seconds,
                epoch=self._timer.epoch,
            )
        self._session.folder.write(found)
        self._session.folder.write_history(found)


def _asks_chief_for_words(config: TrainConfig) -> bool:
    """Whether the dataset makes a vocabulary, and other processes shall have the same."""
    return (
        config.traits.processes and data.knows(config.dataset, "vocabulary") and "vocabulary" not in config.load_options
    )


def _vocabularies(source: data.Source) -> dict[str, list[str]]:
    """The words by number of those vocabularies that the dataset has."""
    found = {name: list(getattr(source.spec, name)) for name in ("vocabulary", "target_vocabulary")}
    return {name: tokens for name, tokens in found.items() if tokens}


def _fingerprint_of_numbers(source: data.Source, split: str) -> str:
    x, y = source.arrays(split)
    return consensus.fingerprint_of_arrays([*(x.values() if isinstance(x, dict) else [x]), y])


def _keeps_streams(config: TrainConfig) -> bool:
    return models.knows(config.model, "streams")


def _model_options(config: TrainConfig) -> dict[str, Any]:
    """What the model is told: a model that keeps the state of streams has one for each example of a global batch."""
    of_batch = {"streams": config.batch_size} if _keeps_streams(config) else {}
    return of_batch | dict(config.model_options)


def _learning_rate(optimizer: Any) -> float | None:
    """The learning rate of the whole run; none where it follows a schedule."""
    if isinstance(keras_internals.learning_rate(optimizer), keras.optimizers.schedules.LearningRateSchedule):
        return None
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _job_settings(config: TrainConfig) -> dict[str, str]:
    """What all processes of a job must have been told alike."""
    alike = (
        "model",
        "dataset",
        "data_options",
        "on_bad_example",
        "augment",
        "limit",
        "epochs",
        "batch_size",
        "model_options",
        "strategy_options",
        "optimizer",
        "learning_rate",
        "momentum",
        "weight_decay",
        "schedule",
        "warmup_epochs",
        "dtype_policy",
        "gradient_accumulation",
        "seed",
    )
    return {"--" + name.replace("_", "-"): str(getattr(config, name)) for name in alike}


def _continued(before: list[str], now: list[str]) -> list[str]:
    """The command of a run that is resumed: `now`, after `before` where it takes its options from there."""
    complete = any(argument == "--strategy" or argument.startswith("--strategy=") for argument in now)
    return now if complete else [*before, *now[2:]]


def _refuse_other_run(config: TrainConfig, earlier: RunRecord) -> None:
    """A run is the same run only on the same examples in the same order."""
    now_options = {name: str(value) for name, value in config.load_options.items()}
    before_options = earlier.dataset.options
    names = sorted(before_options | now_options)
    settings = [
        ("--dataset", earlier.dataset.name, config.dataset),
        *(("--data-option", _setting(name, before_options), _setting(name, now_options)) for name in names),
        ("--augment", earlier.dataset.augment, config.augment),
        ("--model", earlier.model.name, config.model),
        ("--batch-size", earlier.global_batch_size, config.batch_size),
        ("--seed", earlier.seed, config.seed),
    ]
    for option, before, now in settings:
        if before != now:
            raise UsageError(
                f"The run in `{config.run_dir}` was started with `{option} {before}`, and it is resumed with "
                f"`{option} {now}`",
                f"use `{option} {before}`, or begin another run in another `--run-dir`",
            )


def _setting(name: str, options: Mapping[str, str]) -> str:
    return f"{name}={options[name]}" if name in options else f"{name} unset"


@contextlib.contextmanager
def _whole_run_folder(folder: RunFolder) -> Any:
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"The run folder `{folder.path}` cannot be written: {error.strerror}",
            "make room, or choose another `--run-dir`",
        ) from error
