"""A trace of a range of training steps, for TensorBoard's Profile plugin and `tfdist.profiling.trace.summarize`.

Synopsis:

    profile = Profile(first=10, last=20, log_dir="logs")
    model.fit(x, y, callbacks=[profile])  # then: tensorboard --logdir logs, tab PROFILE
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist import terminal
from tfdist.callbacks.throughput import StepCounter
from tfdist.errors import UsageError
from tfdist.jobs import consensus
from tfdist.options import checks_arguments
from tfdist.profiling import remote as remote_profiler
from tfdist.profiling import trace


class Profile(keras.callbacks.Callback):
    """Traces the training steps `first` to `last - 1`, with a marker around each.

    Steps are counted from 0 over the whole `fit`, across epochs. In tfdist's loop only the traced steps run one by one.
    With stock Keras' `steps_per_execution` a marker covers a whole execution, and every execution that overlaps the
    range is traced. An evaluation within the range is in the trace, too, outside of the markers.

    Args:
        first: the first step to trace, 0 or more. Steps 0 and 1 consist mostly of the tracing of graphs.
        last: the step after the last traced step.
        log_dir: the folder; the trace is written to `plugins/profile/<time>/` in it. The processes of a job write their
            traces side by side if they have the same folder; the traces of servers are written there, too.

    Attributes:
        traced: whether the latest `fit` has written a trace. If it cannot be written, a warning says so, and the
            training continues.

    Raises:
        UsageError: not 0 <= first < last; at the beginning of training, if it ends before `first`; or, at the first
            traced step, if another trace is running.
    """

    @checks_arguments
    def __init__(self, first: int, last: int, log_dir: str | os.PathLike[str]):
        super().__init__()
        if not 0 <= first < last:
            raise UsageError(
                f"The range of steps to profile is not 0 <= first < last. Received: `{first}:{last}`",
                "steps are counted from 0 and the last is excluded: `10:20` traces ten steps",
            )
        self.first = first
        self.last = last
        self.log_dir = os.fspath(log_dir)
        self._running = False
        self._own_dir = self.log_dir
        self._run: str | None = None  # the common name of the traces of all processes
        self._name = ""  # the name of this process's trace
        self._servers: Mapping[str, str] = {}
        self._remote: remote_profiler.RemoteTraces | None = None
        self._peers: consensus.Peers = consensus.Alone()
        self._reset()

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._peers = consensus.Alone()  # in Keras' own loop; tfdist's loop then calls `set_training`

    def set_training(self, strategy: consensus.Peers, data: Any) -> None:
        """Called by tfdist's loop before training."""
        del data
        self._peers = strategy

    def _reset(self) -> None:
        self.close()  # an earlier `fit` may have ended with an exception, without `on_train_end`
        self.traced = False
        self._failed = False
        self._counter = StepCounter()
        self._marker: AbstractContextManager[Any] | None = None
        self._runs_single_steps = False  # set where the loop calls `batches_until_hook`, and ends a chunk at `first`

    def close(self) -> None:
        """Stops a running trace and writes it; only needed if `fit` ended with an exception."""
        if self._running:
            self._running = False
            self._end_marker()
            try:
                self._write()
                self.traced = True
            except (OSError, tf.errors.OpError) as error:
                self._failed = True
                reason = str(error).partition("\n")[0]
                terminal.say(f"warning: The trace cannot be written to `{self.log_dir}`: {reason}")

    def _write(self) -> None:
        trace.stop()
        if self._run is not None:
            trace.put_beside(self._own_dir, self.log_dir, self._run, self._name)
            if self._remote is not None:
                self._remote.stop(trace.folder_of(self.log_dir, self._run))
        if not list(Path(self.log_dir).glob("plugins/profile/*/*.xplane.pb")):
            raise OSError(f"no space is left, or `{self.log_dir}` is not writable")

    def batches_until_hook(self, batch: int) -> int | None:
        """Returns the number of batches up to `first`, then 1, and `None` after `last`."""
        self._runs_single_steps = True
        self._counter.chunk_begins(batch)
        step = self._counter.number(batch)
        if step >= self.last:
            return None
        if step >= self.first:
            return 1
        steps = self.params.get("steps")
        in_this_epoch = steps is None or self.first - step < steps - batch
        return self.first - step if in_this_epoch else None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._reset()
        self._require_steps()
        peers = self._peers
        self._servers = peers.servers
        if peers.world.world_size > 1 or self._servers:
            self._run = consensus.broadcast_from_chief(peers, time.strftime("%Y_%m_%d_%H_%M_%S"))
            self._name = "chief-0" if self._servers else f"rank-{peers.world.rank}"
            self._own_dir = os.path.join(self.log_dir, f"of-{self._name}")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._counter.begin_epoch(self.params.get("steps"))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the trace if the next steps reach `first`, and marks them."""
        self._counter.chunk_begins(batch)
        step = self._counter.number(batch)
        if self.traced or self._failed or step >= self.last or step + self._chunk_length() <= self.first:
            return
        if not self._running:
            trace.start(self._own_dir)
            self._running = True
            self._remote = remote_profiler.RemoteTraces(self._servers) if self._servers else None
        self._marker = trace.step_marker(step)
        self._marker.__enter__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Ends the marker, and the trace at `last`."""
        self._counter.chunk_ended(batch)
        self._end_marker()
        if self._counter.number(batch) + 1 >= self.last:
            self.close()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._counter.end_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the trace if training ended within the range; warns if it ended before the range."""
        self.close()
        if self.untraced is not None:
            warnings.warn(self.untraced, stacklevel=2)

    @property
    def untraced(self) -> str | None:
        """A sentence that explains why the latest `fit` has written no trace; `None` if it has, or has warned."""
        if self.traced or self._failed:
            return None
        return (
            f"Nothing was traced: training ended after {self._counter.steps_before_epoch} steps, "
            f"and the range to profile is {self.first}:{self.last}"
        )

    def _require_steps(self) -> None:
        """Raises `UsageError` for a range that begins after the last step, if the number of steps is known."""
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        if steps and epochs and self.first >= steps * epochs:
            raise UsageError(
                f"The range of steps to profile is {self.first}:{self.last}, and training has {steps * epochs} steps "
                f"({epochs} x {steps})",
                f"profile earlier steps, such as `{max(0, steps * epochs - 10)}:{steps * epochs}`, or train for longer",
            )

    def _chunk_length(self) -> int:
        return 1 if self._runs_single_steps else self.model.steps_per_execution

    def _end_marker(self) -> None:
        if self._marker is not None:
            self._marker.__exit__(None, None, None)
            self._marker = None
