"""Workers that take steps at their own pace: the worker processes of a job, or threads of this process.

count                            the number of workers
schedule(function, arguments)    lets a free worker run a `tf.function`; returns a handle of the result
results_of(scheduled)            waits for all scheduled calls, and returns their results as NumPy arrays
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.internals import tensorflow_coordinator
from tfdist.jobs import rendezvous
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World

# How often the coordinator checks for silent workers while it waits for closures.
SECONDS_BETWEEN_CHECKS = 1.0
# The time that TensorFlow takes to notice that a worker was dropped, and to reassign its closures.
SECONDS_TO_REASSIGN = 30.0


class Threads:
    """Threads of this process.

    Args:
        count: the number of threads.
        name: the prefix of the threads' names.
    """

    def __init__(self, count: int, name: str):
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    def schedule(self, function: Any, arguments: Sequence[Any]) -> Future[Any]:
        """Lets a free thread run the `tf.function` `function(*arguments)`."""
        function.get_concrete_function(*arguments)  # one thread at a time may trace a step
        return self._pool.submit(function, *arguments)

    def results_of(self, scheduled: Sequence[Future[Any]]) -> list[Any]:
        """Waits for all scheduled calls, and returns their results as NumPy arrays."""
        try:
            return [tf.nest.map_structure(np.asarray, future.result()) for future in scheduled]
        finally:  # after an error too, no thread may still change the variables
            for future in scheduled:
                future.cancel()
            wait(scheduled)


class Processes:
    """The workers of a job with parameter servers, as its chief reaches them.

    Args:
        job: all processes of the job.
        coordinator: TensorFlow's cluster coordinator.
        timeout_seconds: how long to wait for a silent worker before its closures are reassigned.
    """

    def __init__(self, job: World, coordinator: Any, timeout_seconds: float):
        self.count = len(job.tasks_of("worker"))
        self.timeout_seconds = timeout_seconds
        self.job, self._coordinator = job, coordinator

    def schedule(self, function: Any, arguments: Sequence[Any]) -> Any:
        """Lets a free worker run `function(*arguments)`; returns a `RemoteValue`."""
        return self._coordinator.schedule(function, args=tuple(arguments))

    def results_of(self, scheduled: Sequence[Any]) -> list[Any]:
        """Waits for all scheduled closures, and returns their results as NumPy arrays.

        The closures of a silent worker are reassigned to other workers.

        Raises:
            ClusterError: no worker has finished a closure for too long.
        """
        watchdog, pending = Watchdog(self), len(scheduled)
        while not tensorflow_coordinator.wait_for_closures(self._coordinator, SECONDS_BETWEEN_CHECKS):
            previous = pending
            pending = sum(not tensorflow_coordinator.finished(value, 0) for value in scheduled)
            if pending < previous:
                watchdog = Watchdog(self)
            watchdog.check()
        return [value.fetch() for value in scheduled]

    def on_each(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs `function` on all workers; returns their results in a form that `schedule` accepts as an argument."""
        return tensorflow_coordinator.on_each_worker(self._coordinator, function, *arguments)

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[Any] | None:
        """Runs `function` on all workers; returns NumPy arrays, or `None` if a worker fails or is silent too long."""
        return tensorflow_coordinator.answers_of_workers(self.on_each(function, *arguments), self.timeout_seconds)

    def silent(self, role: str) -> list[Task]:
        """Returns the tasks of a role that do not answer."""
        return [task for task in self.job.tasks_of(role) if not rendezvous.serves(task)]

    def explained(self, error: tf.errors.OpError) -> ClusterError | None:
        """Returns the error to raise instead of TensorFlow's if a parameter server is the cause; else `None`."""
        lost = [str(task) for task in self.silent("ps")]
        if lost:
            return ClusterError.lost(f"Gone: {', '.join(lost)}, with its part of the variables")
        server = re.search(r"/job:ps/replica:0/task:(\d+)", error.message)
        if isinstance(error, tf.errors.UnavailableError) and server:
            return ClusterError.lost(f"Connections to ps {server[1]} broke, although it is still running")
        return None


class Watchdog:
    """Watches over a wait in which no closure has finished since the watchdog was made."""

    def __init__(self, workers: Processes):
        self._workers = workers
        self._started = time.monotonic()

    def check(self) -> None:
        """Ends a wait that takes too long; called repeatedly.

        Closures of silent workers fail after the timeout (see `tfdist.parameter_server.endings`), and are reassigned.

        Raises:
            ClusterError: no worker has finished a closure for too long.
        """
        waited, timeout = time.monotonic() - self._started, self._workers.timeout_seconds
        if waited < timeout + max(timeout, SECONDS_TO_REASSIGN):
            return
        silent = ", ".join(map(str, self._workers.silent("worker")))
        end = f": {silent}" if silent else ", although all of them answer"
        raise ClusterError.lost(f"No worker has finished a step for {waited:.0f} s{end}")
