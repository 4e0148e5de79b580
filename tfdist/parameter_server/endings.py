"""How the processes of a job end: with their chief, or with an error that names the process that is lost.

TensorFlow waits for silent processes without limit, in every role. So each process probes the others that it
cannot do without (`tfdist.jobs.liveness`), and ends when one is lost, whatever its own program waits for:

    a parameter server is lost    all processes end with the error: a part of the variables is lost
    the chief is lost             the workers and the parameter servers end with the error
    a worker is silent            the chief hangs up, so that its closures fail as if it had died, and are reassigned
    the chief's program ends      it tells the workers and the parameter servers, which then end without an error
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.internals import tensorflow_coordinator
from tfdist.jobs import liveness, ports, process_exit
from tfdist.jobs.connections import Loss
from tfdist.jobs.liveness import Limits, LivenessProbe, State
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World

SECONDS_TO_TELL = 3.0
_END = "tfdist end"


class ChiefLiveness:
    """The chief probes the workers and the parameter servers from its start to the end of its process.

    Args:
        world: the job.
        limits: how long they may be silent.
    """

    def __init__(self, world: World, limits: Limits):
        self._world, self._limits = world, limits
        self._probe = LivenessProbe(world, range(1, world.world_size), limits, self._lost)
        # The destructors of TensorFlow's objects may wait for a process that is lost.
        process_exit.end_at_failure()
        atexit.register(self._tell_all)

    def start(self) -> contextlib.AbstractContextManager[None]:
        """The context in which TensorFlow connects with all servers; ends the process if that takes too long."""
        return process_exit.limited(
            self._limits.start_seconds, lambda: self._start_error(self._probe.missing()), self._start_error([])
        )

    def _start_error(self, missing: Sequence[int]) -> ClusterError:
        names = self._world.named_all(missing or range(1, self._world.world_size))
        return ClusterError(
            f"TensorFlow did not connect with {names} within {self._limits.start_seconds:g} s",
            "see the output of these processes, and see that the machines of the job can reach each other",
        )

    def _lost(self, losses: list[State]) -> None:
        tasks = self._world.tasks
        needed = [loss for loss in losses if tasks[loss.rank].role == "ps" or not loss.has_answered]
        if needed:
            process_exit.end_process(liveness.gone(self._world, needed, self._limits))
        silent = [loss.rank for loss in losses if loss.loss is Loss.SILENT]
        for rank in silent:
            ports.hang_up(tasks[rank].host, tasks[rank].port)
        if silent:
            names = self._world.named_all(silent)
            warnings.warn(f"Silent for {self._limits.seconds:g} s: {names}", stacklevel=2)

    def _tell_all(self) -> None:
        """Tells the others that the program has ended without an error."""
        missing = self._probe.missing()
        tasks = [task for rank, task in enumerate(self._world.tasks) if rank and rank not in missing]
        threads = [threading.Thread(target=_tell, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        until = time.monotonic() + SECONDS_TO_TELL
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))


def _tell(task: Task) -> None:
    device = f"/job:{task.role}/replica:0/task:{task.index}/device:CPU:0"
    # A process that cannot be told ends with an error, and names this one.
    with contextlib.suppress(tf.errors.OpError), tf.device(device):
        tensorflow_coordinator.call_served(_END, [], [tf.TensorSpec([], tf.bool)])[0].numpy()


class ServerLiveness:
    """A worker or a parameter server probes the chief and the parameter servers.

    To be made before the server starts, since the chief may tell its end as soon as the server runs.

    Args:
        world: the job.
        limits: how long they may be silent.
    """

    def __init__(self, world: World, limits: Limits):
        self._world, self._limits = world, limits
        self._losses: queue.SimpleQueue[list[State]] = queue.SimpleQueue()
        self._has_ended = threading.Event()
        tensorflow_coordinator.serve_function(_END, functools.partial(_note, self._has_ended))

    def end_with_chief(self) -> NoReturn:
        """Waits for the end of the chief, and ends this process; with an error if a process is lost before."""
        needed = [
            rank
            for rank, task in enumerate(self._world.tasks)
            if task.role in ("chief", "ps") and rank != self._world.rank
        ]
        probe = LivenessProbe(self._world, needed, self._limits, self._losses.put)
        losses = self._losses.get()
        probe.close()
        if not self._has_ended.is_set():
            process_exit.end_process(liveness.gone(self._world, losses, self._limits))
        sys.exit(0)


def _note(event: threading.Event) -> np.bool_:
    event.set()
    return np.bool_(True)
