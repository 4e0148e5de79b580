"""Each callback under stock `model.fit`, and its protocol with a loop that runs many steps in one call."""

import contextlib
import csv
import doctest
import time
import warnings
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

import tfdist
from tfdist.callbacks import (
    Checkpoint,
    ChiefOnly,
    LearningRateWarmup,
    MemoryUsage,
    Profile,
    Throughput,
    TimeToTarget,
    memory,
)
from tfdist.callbacks import throughput as throughput_module
from tfdist.callbacks.throughput import StepCounter, TrainingClock
from tfdist.errors import UsageError
from tfdist.jobs.world import World

X = np.linspace(-1, 1, 70, dtype="float32").reshape(70, 1)
Y = 3 * X


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    """Since the profiler writes to the folder `unused`."""
    monkeypatch.chdir(tmp_path)


def compiled_model(optimizer=None, **options):
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss="mse", jit_compile=False, **options)
    return model


def fit(callbacks, model=None, *, batch_size=8, **options):
    model = model or compiled_model()
    return model.fit(X, Y, batch_size=batch_size, callbacks=callbacks, verbose=0, **options)


@pytest.mark.parametrize("module", [throughput_module, memory])
def test_the_synopses_run(module):
    assert doctest.testmod(module).failed == 0


class Passing(keras.callbacks.Callback):
    """A clock on which each training and each evaluation batch takes a known time, and nothing else any."""

    def __init__(self, train, evaluation):
        super().__init__()
        self.train, self.evaluation = train, evaluation
        self.seconds = 0.0

    def time(self, callback):
        """`callback`, reading this clock."""
        callback.clock = TrainingClock(now=lambda: self.seconds)
        return callback

    def on_train_batch_end(self, batch, logs=None):
        self.seconds += self.train

    def on_test_batch_end(self, batch, logs=None):
        self.seconds += self.evaluation


class TestThroughput:
    def test_history_and_later_callbacks_see_both_figures(self, tmp_path):
        logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
        history = fit([Throughput(8), logger], epochs=2).history
        assert len(history["examples_per_second"]) == len(history["step_seconds"]) == 2
        with open(tmp_path / "log.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [float(row["step_seconds"]) for row in rows] == history["step_seconds"]

    def test_a_short_last_batch_counts_as_whole_where_only_the_batch_size_is_known(self):
        throughput = Throughput(8)
        history = fit([throughput]).history
        assert history["step_seconds"][0] * 9 == pytest.approx(throughput.train_seconds)
        assert history["examples_per_second"][0] * throughput.train_seconds == pytest.approx(72)

    def test_the_loops_own_number_of_examples_is_preferred(self):
        class Announce(keras.callbacks.Callback):
            def set_params(self, params):
                params["examples"] = 70
                super().set_params(params)

        throughput = Throughput()
        history = fit([Announce(), throughput]).history
        assert history["examples_per_second"][0] * throughput.train_seconds == pytest.approx(70)

    def test_evaluation_is_no_training_time(self):
        passing = Passing(train=0.25, evaluation=2.0)
        throughput = passing.time(Throughput(8))
        history = fit([throughput, passing], validation_data=(X, Y), epochs=2).history
        assert throughput.train_seconds == pytest.approx(9 * 0.25)
        assert throughput.evaluation_seconds == pytest.approx(9 * 2.0)
        assert history["step_seconds"] == pytest.approx([0.25] * 2)
        assert history["examples_per_second"] == pytest.approx([8 / 0.25] * 2)

    def test_the_real_clock_runs(self):
        throughput = Throughput(8)
        began = time.perf_counter()
        fit([throughput], validation_data=(X, Y))
        assert throughput.evaluation_seconds > 0
        assert 0 < throughput.train_seconds < time.perf_counter() - began

    def test_steps_are_counted_where_fit_does_not_know_them(self):
        data = tf.data.Dataset.from_tensor_slices((X[:40], Y[:40])).batch(8).filter(lambda x, y: True)
        throughput = Throughput(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns that the data ran out
            history = compiled_model().fit(data, callbacks=[throughput], verbose=0).history
        assert throughput.train_seconds / history["step_seconds"][0] == pytest.approx(5)

    @pytest.mark.parametrize("steps_per_execution", [1, 4])
    def test_an_epoch_cut_short_counts_only_its_steps(self, steps_per_execution):
        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch >= 3

        throughput = Throughput(8)
        history = fit([throughput, Stop()], compiled_model(steps_per_execution=steps_per_execution)).history
        assert throughput.train_seconds / history["step_seconds"][0] == pytest.approx(4)

    def test_an_epoch_cut_short_counts_only_the_examples_of_its_steps(self):
        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch >= 3

        throughput, model = Throughput(), compiled_model()
        callbacks = [throughput, Stop()]
        history = tfdist.strategy("single").fit(model, X, Y, batch_size=7, callbacks=callbacks, verbose=0).history
        assert history["examples_per_second"][0] * throughput.train_seconds == pytest.approx(4 * 7)

    def test_a_resumed_epoch_counts_only_the_steps_it_runs(self):
        counter = StepCounter()
        counter.begin_epoch(10)
        counter.chunk_begins(6)
        counter.chunk_ended(9)
        assert counter.steps == 4

    def test_no_step_is_run_apart_for_it(self):
        assert run_in_chunks(Throughput(), steps=10, epochs=2, most=6) == [(0, 5), (6, 9)] * 2

    def test_an_unknown_batch_size_is_refused_before_the_first_step(self):
        model = compiled_model()
        with pytest.raises(UsageError, match="does not know the number of examples") as error:
            fit([Throughput()], model)
        assert "global_batch_size" in error.value.hint
        assert model.optimizer.iterations == 0

    def test_a_batch_size_of_zero_is_refused(self):
        with pytest.raises(UsageError, match="Received: `0`"):
            Throughput(0)


class TestTimeToTarget:
    def test_it_stops_at_the_first_epoch_that_reaches_the_target(self):
        timer = TimeToTarget(0.5, monitor="val_loss", mode="min")
        history = fit([timer], validation_data=(X, Y), epochs=50).history
        assert history["val_loss"][-1] <= 0.5 < history["val_loss"][-2]
        assert timer.epoch == len(history["loss"]) < 50

    def test_seconds_are_training_seconds_of_all_epochs_up_to_it(self):
        passing = Passing(train=0.25, evaluation=2.0)
        timer = passing.time(TimeToTarget(0.5, monitor="val_loss", mode="min"))
        fit([timer, passing], validation_data=(X, Y), epochs=50)
        assert timer.epoch > 1
        assert timer.seconds == pytest.approx(timer.epoch * 9 * 0.25)

    def test_without_stop_training_goes_on_and_the_first_time_is_kept(self):
        timer = TimeToTarget(1e9, monitor="loss", mode="min", stop=False)
        assert len(fit([timer], epochs=3).epoch) == 3
        assert timer.epoch == 1

    def test_a_resumed_run_keeps_the_first_time_of_the_run_before(self, tmp_path):
        before, after = (TimeToTarget(1e9, monitor="loss", mode="min", stop=False) for _ in range(2))
        fit([before, Checkpoint(tmp_path)], epochs=2)
        fit([after, Checkpoint(tmp_path, resume=True)], epochs=3)
        assert (after.epoch, after.seconds) == (1, before.seconds)

    def test_a_target_that_is_never_reached_leaves_none(self):
        timer = TimeToTarget(-1.0, monitor="loss", mode="min")
        fit([timer], epochs=2)
        assert timer.seconds is None
        assert timer.epoch is None

    def test_epochs_without_validation_are_no_mistake(self):
        timer = TimeToTarget(1e9, monitor="val_loss", mode="min")
        fit([timer], validation_data=(X, Y), validation_freq=2, epochs=4)
        assert timer.epoch == 2

    def test_an_unknown_metric_is_refused_with_the_known_ones(self):
        with pytest.raises(UsageError, match=r"`val_acuracy`.*`loss`, `val_loss`"):
            fit([TimeToTarget(0.9, monitor="val_acuracy")], validation_data=(X, Y))

    def test_training_without_any_evaluation_is_warned_of(self):
        with pytest.warns(UserWarning, match="never saw `val_accuracy`"):
            fit([TimeToTarget(0.9)])

    def test_an_unknown_mode_is_refused(self):
        with pytest.raises(UsageError, match="Unknown mode `maximum`"):
            TimeToTarget(0.9, mode="maximum")


class TestMemoryUsage:
    def test_the_peak_grows_by_what_is_allocated_and_never_falls(self):
        class Allocate(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    below_peak = memory.peak_resident_bytes() - psutil.Process().memory_info().rss
                    np.ones((50_000_000 + below_peak) // 8)

        first, second, third = fit([Allocate(), MemoryUsage()], epochs=3).history["peak_memory_bytes"]
        assert second >= first + 40_000_000
        assert third >= second

    def test_without_proc_the_operating_systems_figure_is_used(self, monkeypatch):
        expected = memory.peak_resident_bytes()
        monkeypatch.setattr(memory, "_high_water_mark", lambda: None)
        assert memory.peak_resident_bytes() >= 0.5 * expected

    def test_the_fullest_gpu_counts(self, monkeypatch):
        class Gpu:
            def __init__(self, name):
                self.name = name

        peaks = {"GPU:0": 5, "GPU:1": 7}
        in_cluster = [*peaks, "/job:worker/replica:0/task:1/device:GPU:0"]  # of another process
        known = memory.tf.config.experimental.get_memory_info
        monkeypatch.setattr(memory.tf.config, "list_logical_devices", lambda kind: list(map(Gpu, in_cluster)))
        monkeypatch.setattr(
            memory.tf.config.experimental,
            "get_memory_info",
            lambda name: {"peak": peaks[name]} if name in peaks else known(name),
        )
        assert fit([MemoryUsage()]).history["peak_gpu_memory_bytes"] == [7]


class FakeProfiler:
    """Notes what a trace would hold."""

    def __init__(self, monkeypatch):
        self.events = []
        self.log_dir = None
        for name in ("start", "stop", "step_marker"):
            monkeypatch.setattr(f"tfdist.profiling.trace.{name}", getattr(self, name))

    def start(self, log_dir):
        self.events.append("start")
        self.log_dir = Path(log_dir)

    def stop(self):
        self.events.append("stop")
        trace = self.log_dir / "plugins" / "profile" / "now" / "host.xplane.pb"
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.touch()

    def step_marker(self, number):
        self.events.append(number)
        return contextlib.nullcontext()


class TestProfile:
    """What is traced and when; what a real trace holds is tested in test_profiler.py."""

    @pytest.fixture
    def fake(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        return FakeProfiler(monkeypatch)

    def test_the_range_is_counted_over_epochs_and_excludes_its_end(self, fake):
        profile = Profile(8, 11, "unused")
        fit([profile], epochs=3)
        assert fake.events == ["start", 8, 9, 10, "stop"]
        assert profile.traced

    def test_executions_of_many_steps_are_traced_where_they_overlap_the_range(self, fake):
        fit([Profile(5, 9, "unused")], compiled_model(steps_per_execution=4), epochs=2)
        assert fake.events == ["start", 4, 8, "stop"]

    def test_training_that_ends_inside_the_range_writes_the_trace(self, fake):
        fit([Profile(5, 100, "unused")])
        assert fake.events == ["start", 5, 6, 7, 8, "stop"]

    def test_a_range_behind_the_end_is_refused_at_the_start(self, fake):
        with pytest.raises(UsageError, match=r"is 18:20, and training has 18 steps \(2 x 9\)"):
            fit([Profile(18, 20, "unused")], epochs=2)
        assert fake.events == []

    def test_training_that_ends_before_the_range_is_warned_of(self, fake):
        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = True

        with pytest.warns(UserWarning, match="Nothing was traced: training ended after 9 steps.*10:11"):
            fit([Stop(), Profile(10, 11, "unused")], epochs=2)
        assert fake.events == []

    def test_a_fit_that_fails_leaves_nothing_running_for_the_next(self, fake):
        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise RuntimeError("planned")

        profile = Profile(1, 5, "unused")
        with pytest.raises(RuntimeError, match="planned"):
            fit([Fail(), profile])
        fit([profile])
        assert fake.events == ["start", 1, 2, "stop", "start", 1, 2, 3, 4, "stop"]

    def test_only_the_traced_steps_are_run_one_by_one(self, fake):
        profile = Profile(12, 15, "unused")
        begun = run_in_chunks(profile, steps=10, epochs=3)
        assert begun == [(0, 9), (0, 1), (2, 2), (3, 3), (4, 4), (5, 9), (0, 9)]
        assert fake.events == ["start", 12, 13, 14, "stop"]

    def test_in_a_resumed_epoch_the_steps_of_this_fit_count(self, fake):
        begun = run_in_chunks(Profile(2, 4, "unused"), steps=10, epochs=1, resume_batch=5)
        assert begun == [(5, 6), (7, 7), (8, 8), (9, 9)]
        assert fake.events == ["start", 2, 3, "stop"]

    @pytest.mark.parametrize(("first", "last"), [(-1, 5), (5, 5), (6, 5)])
    def test_a_range_that_is_none_is_refused(self, first, last):
        with pytest.raises(UsageError, match=f"Received: `{first}:{last}`"):
            Profile(first, last, "unused")


def run_in_chunks(callback, *, steps, epochs, most=50, resume_batch=0):
    """A loop that runs as many steps in a call as `callback` allows; the chunks it ran, first and last."""
    chunks = []
    model = compiled_model()
    callback.set_params({"steps": steps, "epochs": epochs, "examples": 8 * steps})
    callback.set_model(model)
    callback.on_train_begin()
    for epoch in range(epochs):
        callback.on_epoch_begin(epoch)
        batch, resume_batch = resume_batch, 0
        while batch < steps:
            length = min(callback.batches_until_hook(batch) or most, most, steps - batch)
            callback.on_train_batch_begin(batch)
            chunks.append((batch, batch + length - 1))
            batch += length
            callback.on_train_batch_end(batch - 1, {})
        callback.on_epoch_end(epoch, {})
    callback.on_train_end()
    return chunks


class Rates(keras.callbacks.Callback):
    """The learning rate at each step."""

    def on_train_begin(self, logs=None):
        self.rates = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def expected_rate(step, *, base=0.01, factor=4, warmup_steps=18):
    return base * (1 + (factor - 1) * min(step / warmup_steps, 1))


class TestLearningRateWarmup:
    """70 examples in batches of 8: 9 steps an epoch."""

    def warmup(self, **options):
        return LearningRateWarmup(4, **{"warmup_epochs": 2, **options})

    def model(self):
        return compiled_model(keras.optimizers.SGD(0.01))

    def test_a_run_resumed_where_the_warmup_ends_has_the_full_rate(self):
        rates, model = Rates(), self.model()
        fit([self.warmup()], model, epochs=2)
        fit([self.warmup(base_learning_rate=0.01), rates], model, epochs=3, initial_epoch=2)
        assert rates.rates == pytest.approx([0.04] * 9)

    def test_a_run_resumed_with_another_factor_goes_on_at_the_rate_for_that(self, tmp_path):
        rates = Rates()
        fit([self.warmup(), Checkpoint(tmp_path)], self.model(), epochs=3)
        fit([LearningRateWarmup(2, 2), Checkpoint(tmp_path, resume=True), rates], self.model(), epochs=4)
        assert rates.rates == pytest.approx([0.02] * 9)

    def test_the_rate_rises_linearly_to_factor_times_the_base_and_stays(self):
        rates = Rates()
        history = fit([self.warmup(), rates], self.model(), epochs=3).history
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(27)])
        assert history["learning_rate"] == pytest.approx([expected_rate(s) for s in (8, 17, 26)])

    def test_half_epochs_and_none_at_all(self):
        rates = Rates()
        fit([self.warmup(warmup_epochs=1.5), rates], self.model(), epochs=2)
        assert rates.rates == pytest.approx([expected_rate(step, warmup_steps=13.5) for step in range(18)])
        fit([self.warmup(warmup_epochs=0), rates], self.model())
        assert rates.rates == pytest.approx([0.04] * 9)

    def test_after_the_warmup_the_rate_belongs_to_others(self):
        class Halve(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 2:
                    self.model.optimizer.learning_rate = 0.005

        rates = Rates()
        fit([self.warmup(), Halve(), rates], self.model(), epochs=4)
        assert rates.rates[-9:] == pytest.approx([0.005] * 9)

    def test_a_continued_fit_goes_on_where_it_was(self):
        model, warmup, rates = self.model(), self.warmup(), Rates()
        fit([warmup, rates], model, epochs=1)
        fit([warmup, rates], model, epochs=3, initial_epoch=1)
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(9, 27)])

    def test_a_new_process_goes_on_with_the_rate_of_the_first_epoch_it_runs(self):
        rates = Rates()
        fit([self.warmup(), rates], self.model(), epochs=3, initial_epoch=1)
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(9, 27)])

    def test_backup_and_restore_resumes_the_warmup(self, tmp_path):
        class Interrupt(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    raise KeyboardInterrupt

        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        with pytest.raises(KeyboardInterrupt):
            fit([backup, self.warmup(), Interrupt()], self.model(), epochs=3)
        rates = Rates()
        fit([backup, self.warmup(), rates], self.model(), epochs=3)
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(9, 27)])

    def test_a_rate_restored_after_the_warmup_is_kept(self, tmp_path):
        model = self.model()
        fit([self.warmup()], model, epochs=3)
        model.optimizer.learning_rate = 0.007
        model.save(tmp_path / "model.keras")
        rates = Rates()
        fit(
            [self.warmup(), rates],
            keras.saving.load_model(tmp_path / "model.keras"),
            epochs=4,
            initial_epoch=3,
        )
        assert rates.rates == pytest.approx([0.007] * 9)

    def test_a_loaded_optimizer_inside_the_warmup_needs_the_base_rate(self, tmp_path):
        model = self.model()
        fit([self.warmup()], model, epochs=1)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        with pytest.raises(UsageError, match="may not be the base rate") as error:
            fit([self.warmup()], loaded, epochs=2, initial_epoch=1)
        assert "base_learning_rate" in error.value.hint
        rates = Rates()
        fit([self.warmup(base_learning_rate=0.01), rates], loaded, epochs=2, initial_epoch=1)
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(9, 18)])

    def test_chunks_get_the_rate_of_their_first_step(self):
        rates = Rates()
        model = compiled_model(keras.optimizers.SGD(0.01), steps_per_execution=3)
        fit([self.warmup(), rates], model, epochs=2)
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(0, 18, 3)])

    def test_only_the_warmup_is_run_step_by_step(self):
        chunks = run_in_chunks(self.warmup(), steps=4, epochs=4)
        assert chunks == [(step, step) for step in range(4)] * 2 + [(0, 3)] * 2
        half = run_in_chunks(self.warmup(warmup_epochs=0.5), steps=4, epochs=1)
        assert half == [(0, 0), (1, 1), (2, 2), (3, 3)]

    def test_under_loss_scaling_the_inner_optimizer_is_warmed_up(self):
        rates = Rates()
        model = compiled_model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)))
        fit([self.warmup(), rates], model, epochs=1)
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(9)])

    def test_a_rate_that_is_mirrored_on_several_devices_is_warmed_up(self):
        devices = [device.name for device in tf.config.list_logical_devices("CPU")]
        with tf.distribute.MirroredStrategy(devices[:2]).scope():
            model = self.model()
        rates = Rates()
        history = fit([self.warmup(), rates], model, epochs=1).history
        assert rates.rates == pytest.approx([expected_rate(step) for step in range(9)])
        assert history["learning_rate"] == pytest.approx([expected_rate(8)])

    @pytest.mark.parametrize("wrap", [lambda o: o, keras.optimizers.LossScaleOptimizer])
    def test_a_schedule_is_refused_by_name(self, wrap):
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
        with pytest.raises(UsageError, match="follows a schedule, `CosineDecay`"):
            fit([self.warmup()], compiled_model(wrap(keras.optimizers.SGD(schedule))))

    def test_data_of_unknown_length_needs_the_steps_of_an_epoch(self):
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).filter(lambda x, y: True)
        with pytest.raises(UsageError, match="does not know the number of steps"):
            self.model().fit(data, callbacks=[self.warmup()], verbose=0)
        rates = Rates()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns that the data ran out
            self.model().fit(data, callbacks=[self.warmup(steps_per_epoch=9), rates], verbose=0)
        assert rates.rates[:9] == pytest.approx([expected_rate(step) for step in range(9)])

    @pytest.mark.parametrize("options", [{"factor": 0}, {"factor": 2, "warmup_epochs": -1}])
    def test_arguments_out_of_range_are_refused(self, options):
        with pytest.raises(UsageError, match="Received"):
            LearningRateWarmup(**options)


class Recorder(keras.callbacks.Callback):
    """Notes every hook."""

    def __init__(self):
        super().__init__()
        self.calls = []


for _hook in [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]:
    setattr(Recorder, _hook, lambda self, *args, _hook=_hook, **kwargs: self.calls.append((_hook, args)))


class EpochsOnly(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


class TestChiefOnly:
    def run(self, *callbacks):
        model = compiled_model()
        fit(list(callbacks), model, validation_data=(X, Y))
        model.predict(X, callbacks=list(callbacks), verbose=0)
        return model

    def test_the_chief_gets_every_hook_the_model_and_the_parameters(self):
        plain, wrapped = Recorder(), Recorder()
        model = self.run(plain, ChiefOnly(wrapped))  # alone is chief
        assert len({hook for hook, _ in plain.calls}) == 14  # all but on_batch_begin and on_batch_end
        assert wrapped.calls == plain.calls
        assert wrapped.model is model
        assert wrapped.params == plain.params

    def test_other_processes_get_nothing(self):
        wrapped = Recorder()
        self.run(ChiefOnly(wrapped, World(rank=1, world_size=2)))
        assert wrapped.calls == []
        assert wrapped.model is None
        assert wrapped.params is None

    def test_batch_hooks_are_seen_through(self):
        chief, other = World(), World(rank=1, world_size=2)
        assert ChiefOnly(EpochsOnly(), chief).batches_until_hook(0) is None
        assert ChiefOnly(Recorder(), chief).batches_until_hook(0) == 1
        assert ChiefOnly(Recorder(), other).batches_until_hook(0) is None
        on_batch_end = keras.callbacks.LambdaCallback(on_train_batch_end=print)
        assert ChiefOnly(on_batch_end, chief).batches_until_hook(0) == 1
        profile = Profile(7, 9, "unused")
        profile.set_params({"steps": 20})
        assert ChiefOnly(profile, chief).batches_until_hook(0) == 7

    def test_it_wraps_tfdists_own_callbacks(self, tmp_path):
        logger = ChiefOnly(keras.callbacks.CSVLogger(tmp_path / "log.csv"))
        history = fit([ChiefOnly(Throughput(8)), logger]).history
        assert "examples_per_second" in history
        assert "examples_per_second" in (tmp_path / "log.csv").read_text()


class TestInTfdistsLoop:
    """One training with all of them, on 70 examples in batches of 8: 9 steps an epoch."""

    def test_all_of_them_together(self, monkeypatch, tmp_path):
        fake = FakeProfiler(monkeypatch)
        passing = Passing(train=0.25, evaluation=2.0)
        throughput, timer = passing.time(Throughput()), passing.time(TimeToTarget(1e9, "val_loss", "min", stop=False))
        strategy = tfdist.strategy("single")
        with strategy.scope():
            model = compiled_model(keras.optimizers.SGD(0.01))
        strategy.prepare(model)
        callbacks = [
            throughput,
            timer,
            MemoryUsage(),
            LearningRateWarmup(4, warmup_epochs=1),
            Profile(20, 22, "unused"),
            passing,
            ChiefOnly(keras.callbacks.CSVLogger(tmp_path / "log.csv")),
        ]
        history = fit(callbacks, model, epochs=3, validation_data=(X, Y)).history
        assert history["step_seconds"] == pytest.approx([0.25] * 3)
        assert history["examples_per_second"] == pytest.approx([70 / (9 * 0.25)] * 3)  # the short batch as it is
        assert history["learning_rate"] == pytest.approx([0.01 + 0.03 * 8 / 9, 0.04, 0.04])
        assert (timer.epoch, timer.seconds) == (1, pytest.approx(9 * 0.25))
        assert fake.events == ["start", 20, 21, "stop"]
        with open(tmp_path / "log.csv", encoding="utf-8") as file:
            assert [float(row["loss"]) for row in csv.DictReader(file)] == pytest.approx(history["loss"])

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("name", ["single", "custom", "mirrored"])
    def test_the_warmup_is_stock_keras(self, name):
        def weights(model):
            fit([LearningRateWarmup(4, warmup_epochs=1.5)], model, epochs=2, shuffle=False, batch_size=7)
            return np.concatenate([np.ravel(keras.ops.convert_to_numpy(v)) for v in model.weights])

        strategy = tfdist.strategy(name)
        with strategy.scope():
            model = compiled_model(keras.optimizers.SGD(0.01))
        strategy.prepare(model)
        np.testing.assert_allclose(weights(model), weights(compiled_model(keras.optimizers.SGD(0.01))), rtol=1e-5)
