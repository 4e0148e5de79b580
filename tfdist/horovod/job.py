"""Watches the processes of a job that uses `tfdist.horovod`: none waits for the others forever, or without a word.

Each process tells the others what it does, over connections of its own (`tfdist.jobs.heartbeat`). If processes wait for
different operations, or for one that has ended the training they are in, the job ends with an error that says who waits
for what.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import keras
import tensorflow as tf

from tfdist import terminal
from tfdist.errors import ClusterError, DisagreementError
from tfdist.groups import ProcessGroup
from tfdist.groups import horovod as engine
from tfdist.horovod import operations
from tfdist.internals import keras_patches
from tfdist.jobs import process_exit
from tfdist.jobs.connections import gone
from tfdist.jobs.heartbeat import Heartbeat, Limits
from tfdist.jobs.heartbeat.messages import Activity
from tfdist.jobs.world import World


class Progress:
    """What is known of the trainings of this process; read from any thread.

    Attributes:
        stage: 2n - 1 within the nth training, 2n after it.
        place: where this process is, to follow a verb in a message.
    """

    def __init__(self) -> None:
        self.stage = 0
        self.place = ""

    def begin(self) -> None:
        """A training begins; one that was broken off counts as ended."""
        self.stage += 1 + self.stage % 2

    def end(self, place: str) -> None:
        """The training has ended."""
        self.place = place
        self.stage += 1


class Follow(keras.callbacks.Callback):
    """Notes in `progress` how far a training is; the last one of a callback list."""

    def __init__(self, progress: Progress, callback_list: Any):
        super().__init__()
        self._progress = progress
        self._all = callback_list
        self._follows = False
        self._epoch = 0

    def batches_until_hook(self, batch: int) -> int | None:
        """Never: the epoch is enough; see `tfdist.callbacks`."""

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        self._follows = optimizer is not None and keras_patches.around_apply(optimizer) is not None
        if self._follows:
            self._progress.begin()
            self._progress.place = "at the beginning of `fit`"

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._note(f"at the beginning of epoch {epoch + 1}")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note(f"in batch {batch + 1} of epoch {self._epoch + 1}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note(f"after batch {batch + 1} of epoch {self._epoch + 1}")

    def on_train_end(self, logs: Any = None) -> None:
        if self._follows:
            self._progress.end(f"after `fit`, which ended with epoch {self._epoch + 1}{self._reason()}")

    def _note(self, place: str) -> None:
        if self._follows:
            self._progress.place = place

    def _reason(self) -> str:
        if not self.model.stop_training:
            return ""
        known = [one for one in keras_patches.with_wrapped(self._all.callbacks) if _has_stopped(one, self._epoch)]
        if not known:
            return " (`stop_training` was set)"
        return f" (stopped by `{type(known[0]).__name__}` on its own `{known[0].monitor}`)"


def _has_stopped(callback: Any, epoch: int) -> bool:
    return isinstance(callback, keras.callbacks.EarlyStopping) and callback.stopped_epoch == epoch


# Set by Horovod's own elastic jobs, whose processes come and go.
ELASTIC = "HOROVOD_ELASTIC"
_current: list[Job] = []


class Job:
    """What this process does in a job, and what is known of the others.

    Args:
        world: the rank of this process, and the addresses of the others.
        limits: how long processes may wait for different operations, and how long one may be silent or busy.
    """

    def __init__(self, world: World, limits: Limits):
        self._world = world
        self._limits = limits
        self._leaves = False
        self.progress = Progress()
        self._operations = operations.Operations(self.guard, self.start)
        operations.install(self._operations)
        self._hint = (
            "give all processes the same number of batches per epoch (`steps_per_epoch`, `repeat()`), and let them "
            "stop in the same epoch: an `EarlyStopping` behind `MetricAverageCallback` sees the same logs everywhere; "
            f"`hvd.init(timeout_seconds=...)`, now {limits.seconds:g}, is how long such a wait may last"
        )
        self._heartbeat: Heartbeat | None = None
        self._lock = threading.RLock()
        self._starts = True

    def start(self) -> None:
        """Connects the processes, before the first operation in which all of them take part.

        This uses TensorFlow, which a program may configure between `hvd.init` and its first operation.
        """
        with self._lock:
            if not self._starts:
                return
            self._starts = False
            with tf.init_scope():
                self._heartbeat = Heartbeat(
                    self._world,
                    _Exchange(self._world).exchange,
                    self._operations.counts,
                    self._limits,
                    lambda error: process_exit.end_process(error, lambda code: None),
                    self._activity,
                    self._hint,
                )
            atexit.register(self.close)

    def close(self) -> None:
        """Tells the others that this process leaves the job."""
        self._leaves, self._starts = True, False
        if self._heartbeat is not None:
            self._heartbeat.close()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """The context of work with operations of Horovod, whose errors do not say which process is their cause."""
        try:
            yield
        except tf.errors.OpError as error:
            told = self.explained(error)
            self._operations.forget()
            if told is None:
                raise
            raise told from error

    def explained(self, error: BaseException) -> ClusterError | None:
        """The error to raise for one of Horovod; `None` if it is not about the other processes."""
        lines = str(error).splitlines()
        if self._heartbeat is None or not any(
            word in line for line in lines for word in ("orovod", "Mismatched", "loo", "MPI")
        ):
            return None
        mine = f"{self._world.named(self._world.rank)} is {self._activity().text}"
        mismatch = next((line for line in lines if "Mismatched" in line), None)
        if mismatch is not None:
            mismatch = mismatch[mismatch.index("Mismatched") :].partition(" [Op:")[0]
            return DisagreementError(
                f"The processes of the job disagree on what they send ({mine}): {mismatch}",
                "build the same model in all processes, and call the same functions with the same shapes",
            )
        lost = self._heartbeat.silent()
        said = self._heartbeat.last_texts(lost)
        if not said:
            return gone(self._world, lost, self._limits.seconds) if lost else None
        return ClusterError(
            f"A process has ended while another one needs it: {self._heartbeat.activities(said)}, and {mine}",
            self._hint,
        )

    def _activity(self) -> Activity:
        pending = self._operations.pending()
        if self._leaves:
            does = "gone from the job"
        elif pending:
            names = [name or "`hvd.join`, or an operation of a process set" for name in pending]
            does = f"waiting for {' and '.join(names)}"
        else:
            does = "busy"
        return Activity(f"{does} {self.progress.place}".rstrip(), tuple(pending), self.progress.stage)


def begin(world: World, limits: Limits) -> None:
    """Watches the processes of a job of several, from now on until `end`, or the end of the program."""
    if world.world_size == 1 or _current or os.environ.get(ELASTIC) == "1":
        return
    _current.append(Job(world, limits))
    _install()


def end() -> None:
    """This process leaves the job."""
    while _current:
        _current.pop().close()


@functools.cache
def _install() -> None:
    keras_patches.around_steps(around_call=_guarded)
    keras_patches.add_to_callback_lists(
        Follow, lambda callbacks: Follow(_current[0].progress, callbacks) if _current else None
    )
    before = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        told = _current[0].explained(error) if _current and isinstance(error, tf.errors.OpError) else None
        if told is not None:
            terminal.say(f"error: {told}")

    sys.excepthook = on_exception


def _guarded(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(call)
    def guarded(iterator: Any) -> Any:
        with _current[0].guard() if _current else contextlib.nullcontext():
            return call(iterator)

    return guarded


class _Exchange(ProcessGroup):
    """Exchanges messages of any length by Horovod."""

    def __init__(self, world: World):
        self.rank, self.size = world.rank, world.world_size

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with operations.named("the start of the job"), tf.device("CPU:0"):
            return engine.load().allgather(tensor, name=f"tfdist.job.{name}")
