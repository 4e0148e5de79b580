"""Watches the processes of a job that uses `tfdist.horovod`, so that none waits for the others forever.

Each process reports its activity to the others over separate connections (`tfdist.jobs.heartbeat`). If processes wait
for different operations, or for a process that has ended its training, the job ends with an error that names the
processes and the operations.
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
from tfdist.jobs.heartbeat_tree import Activity
from tfdist.jobs.world import World


class Progress:
    """The progress of the trainings of this process; readable from any thread.

    Attributes:
        stage: 2n - 1 within the nth training, 2n after it.
        place: a phrase such as "in batch 3 of epoch 1", for messages.
    """

    def __init__(self) -> None:
        self.stage = 0
        self.place = ""

    def begin(self) -> None:
        """Notes that a training begins; a previous one that was aborted counts as ended."""
        self.stage += 1 + self.stage % 2

    def end(self, place: str) -> None:
        self.place = place
        self.stage += 1


class ProgressCallback(keras.callbacks.Callback):
    """Notes the progress of a training with a distributed optimizer; the last callback of a list.

    Args:
        progress: is updated.
        callback_list: the list, in which an `EarlyStopping` may have stopped the training.
    """

    def __init__(self, progress: Progress, callback_list: Any):
        super().__init__()
        self._progress = progress
        self._callback_list = callback_list
        self._is_distributed = False
        self._epoch = 0

    def batches_until_hook(self, batch: int) -> int | None:
        """Asks for no batch within an epoch; see `tfdist.callbacks`."""

    def on_train_begin(self, logs: Any = None) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        self._is_distributed = optimizer is not None and keras_patches.around_apply(optimizer) is not None
        if self._is_distributed:
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
        if self._is_distributed:
            self._progress.end(f"after `fit`, which ended with epoch {self._epoch + 1}{self._reason()}")

    def _note(self, place: str) -> None:
        if self._is_distributed:
            self._progress.place = place

    def _reason(self) -> str:
        if not self.model.stop_training:
            return ""
        for callback in keras_patches.with_wrapped(self._callback_list.callbacks):
            if isinstance(callback, keras.callbacks.EarlyStopping) and callback.stopped_epoch == self._epoch:
                return f" (stopped by `{type(callback).__name__}` on its own `{callback.monitor}`)"
        return " (`stop_training` was set)"


# Set by Horovod's own elastic jobs, in which the processes may change.
ELASTIC = "HOROVOD_ELASTIC"
_current: list[Job] = []


class Job:
    """The activity of this process in a job, and the heartbeat through which the others see it.

    Args:
        world: the rank of this process, and the addresses of all processes.
        limits: how long processes may wait for different operations, and how long a process may be silent or busy.
    """

    def __init__(self, world: World, limits: Limits):
        self._world = world
        self._limits = limits
        self._left = False
        self.progress = Progress()
        self._operations = operations.Operations(self.guard, self.start)
        operations.install(self._operations)
        self._hint = (
            "give all processes the same number of batches per epoch (`steps_per_epoch`, `repeat()`), and let them "
            "stop in the same epoch: an `EarlyStopping` after `MetricAverageCallback` sees the same logs everywhere; "
            f"`hvd.init(timeout_seconds=...)`, now {limits.seconds:g}, limits such a wait"
        )
        self._heartbeat: Heartbeat | None = None
        self._lock = threading.RLock()
        self._may_start = True

    def start(self) -> None:
        """Connects the processes, before the first operation of all processes.

        This uses TensorFlow, which a program may still configure after `hvd.init`.
        """
        with self._lock:
            if not self._may_start:
                return
            self._may_start = False
            with tf.init_scope():
                self._heartbeat = Heartbeat(
                    self._world,
                    _Exchange(self._world).exchange,
                    self._operations.counts,
                    self._limits,
                    process_exit.end_process,
                    self._activity,
                    self._hint,
                )
            atexit.register(self.close)

    def close(self) -> None:
        """Notifies the other processes that this one leaves the job."""
        self._left, self._may_start = True, False
        if self._heartbeat is not None:
            self._heartbeat.close()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """The context of operations of Horovod, whose own errors do not name the process that caused them."""
        try:
            yield
        except tf.errors.OpError as error:
            explained = self.explained(error)
            self._operations.forget()
            if explained is None:
                raise
            raise explained from error

    def explained(self, error: BaseException) -> ClusterError | None:
        """Returns the error to raise instead of Horovod's; `None` if other processes are not the cause."""
        lines = str(error).splitlines()
        if self._heartbeat is None or not any(
            word in line for line in lines for word in ("orovod", "Mismatched", "loo", "MPI")
        ):
            return None
        own_activity = f"{self._world.named(self._world.rank)} is {self._activity().text}"
        mismatch = next((line for line in lines if "Mismatched" in line), None)
        if mismatch is not None:
            mismatch = mismatch[mismatch.index("Mismatched") :].partition(" [Op:")[0]
            return DisagreementError(
                f"The processes of the job disagree on what they send ({own_activity}): {mismatch}",
                "build the same model in all processes, and call the same functions with the same shapes",
            )
        lost = self._heartbeat.silent()
        activities = self._heartbeat.last_texts(lost)
        if not activities:
            return gone(self._world, lost, self._limits.seconds) if lost else None
        reported = self._heartbeat.activities(activities)
        return ClusterError(
            f"A process has ended while another one needs it: {reported}, and {own_activity}", self._hint
        )

    def _activity(self) -> Activity:
        pending = self._operations.pending()
        if self._left:
            activity = "gone from the job"
        elif pending:
            names = [name or "`hvd.join`, or an operation of a process set" for name in pending]
            activity = f"waiting for {' and '.join(names)}"
        else:
            activity = "busy"
        return Activity(f"{activity} {self.progress.place}".rstrip(), tuple(pending), self.progress.stage)


def begin(world: World, limits: Limits) -> None:
    """Watches the processes of a job with several, until `end` or the end of the program."""
    if world.world_size == 1 or _current or os.environ.get(ELASTIC) == "1":
        return
    _current.append(Job(world, limits))
    _install()


def end() -> None:
    """Leaves the job."""
    while _current:
        _current.pop().close()


@functools.cache
def _install() -> None:
    keras_patches.around_steps(around_call=_guarded)
    keras_patches.add_to_callback_lists(
        ProgressCallback, lambda callbacks: ProgressCallback(_current[0].progress, callbacks) if _current else None
    )
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        explained = _current[0].explained(error) if _current and isinstance(error, tf.errors.OpError) else None
        if explained is not None:
            terminal.say(f"error: {explained}")

    sys.excepthook = on_exception


def _guarded(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(call)
    def guarded(iterator: Any) -> Any:
        with _current[0].guard() if _current else contextlib.nullcontext():
            return call(iterator)

    return guarded


class _Exchange(ProcessGroup):
    """Exchanges messages of any length with Horovod."""

    def __init__(self, world: World):
        self.rank, self.size = world.rank, world.world_size

    def _all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with operations.named("the start of the job"), tf.device("CPU:0"):
            return engine.load().allgather(tensor, name=f"tfdist.job.{name}")
