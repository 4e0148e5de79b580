"""Workers that take steps at their own pace: processes of a job, as its chief reaches them, or threads of this process.

schedule(function, arguments)    lets a free worker run the function
results_of(scheduled)            what was scheduled has ended
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.errors import ClusterError
from tfdist.internals import tensorflow_coordinator
from tfdist.jobs import ports, rendezvous
from tfdist.jobs.task import Task
from tfdist.jobs.world import World

# How often the coordinator looks whether any closure has ended, while it waits for the last one.
SECONDS_BETWEEN_LOOKS = 1.0
# The time that TensorFlow takes to notice that a worker was dropped, and to give its steps to others.
SECONDS_TO_GO_ON = 30.0


class Workers(Protocol):
    """Who runs the steps; `count` is their number."""

    count: int

    def schedule(self, function: Any, arguments: Sequence[Any]) -> Any:
        """Lets a free worker run the `tf.function` `function(*arguments)`; returns a handle of the result."""
        ...

    def results_of(self, scheduled: Sequence[Any]) -> list[Any]:
        """The results of what was scheduled, as NumPy arrays, once all of it has ended."""
        ...


class Threads:
    """Threads of this process.

    Args:
        count: their number.
        name: of the threads.
    """

    def __init__(self, count: int, name: str):
        self.count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    def schedule(self, function: Any, arguments: Sequence[Any]) -> Future[Any]:
        """Lets a free thread run the `tf.function` `function(*arguments)`."""
        function.get_concrete_function(*arguments)  # one thread at a time may trace a step
        return self._pool.submit(function, *arguments)

    def results_of(self, scheduled: Sequence[Future[Any]]) -> list[Any]:
        """The results of what was scheduled, as NumPy arrays, once all of it has ended."""
        try:
            return [tf.nest.map_structure(np.asarray, one.result()) for one in scheduled]
        finally:  # after an error too, nobody changes the variables any more
            for one in scheduled:
                one.cancel()
            wait(scheduled)


class Processes:
    """The workers of a job with parameter servers, as its chief reaches them.

    Args:
        job: all processes.
        coordinator: TensorFlow's.
        timeout_seconds: how long to wait for a worker that is silent, before its closures are given to another.
    """

    def __init__(self, job: World, coordinator: Any, timeout_seconds: float):
        self.count = len(job.tasks_of("worker"))
        self.timeout_seconds = timeout_seconds
        self._job, self._coordinator = job, coordinator

    def schedule(self, function: Any, arguments: Sequence[Any]) -> Any:
        """Lets a free worker run `function(*arguments)`; returns a `RemoteValue`."""
        return self._coordinator.schedule(function, args=tuple(arguments))

    def results_of(self, scheduled: Sequence[Any]) -> list[Any]:
        """The results of `scheduled` closures, as NumPy arrays; closures of a silent worker are given to another one.

        Raises:
            ClusterError: no worker has finished a closure for too long.
        """
        waiting, left = Waiting(self), len(scheduled)
        while not tensorflow_coordinator.wait_for_closures(self._coordinator, SECONDS_BETWEEN_LOOKS):
            before, left = left, sum(not tensorflow_coordinator.finished(value, 0) for value in scheduled)
            if left < before:
                waiting = Waiting(self)
            waiting.look()
        return [value.fetch() for value in scheduled]

    def on_each(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The results of `function` on all workers, to be passed as an argument to `schedule`."""
        return tensorflow_coordinator.on_each_worker(self._coordinator, function, *arguments)

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[Any] | None:
        """The results of `function` on all workers, as NumPy arrays; `None` if one fails, or is silent for too long."""
        return tensorflow_coordinator.answers_of_workers(self.on_each(function, *arguments), self.timeout_seconds)

    def silent(self, role: str) -> list[Task]:
        """The tasks of a role that do not answer."""
        return [task for task in self._job.tasks_of(role) if not rendezvous.serves(task)]

    def names(self) -> list[str]:
        """The workers, as messages name them."""
        return [str(task) for task in self._job.tasks_of("worker")]

    def drop_silent(self) -> list[str]:
        """Ends the connections to workers that do not answer, and returns their names as messages have them.

        Closures on such a worker then fail as if the worker had ended; if it answers again, it gets closures again.
        """
        silent = self.silent("worker")
        for task in silent:
            ports.hang_up(task.host, task.port)
        return [str(task) for task in silent]

    def explained(self, error: tf.errors.OpError) -> ClusterError | None:
        """The error to raise for one of TensorFlow's about a parameter server; `None` if it is about something else."""
        gone = [str(task) for task in self.silent("ps")]
        if gone:
            return ClusterError.lost(f"Gone: {', '.join(gone)}, with its part of the variables")
        broken = isinstance(error, tf.errors.UnavailableError) and _named_server(error.message)
        return ClusterError.lost(f"Connections to {broken} broke, which serves on") if broken else None


class Waiting:
    """Waits for closures of which none has ended since it was made; those of a silent worker go to another one."""

    def __init__(self, workers: Processes):
        self._workers = workers
        self._began, self._patience = time.monotonic(), workers.timeout_seconds

    def look(self) -> None:
        """Called again and again; drops the workers that are silent.

        Raises:
            ClusterError: no worker has finished a closure for too long.
        """
        waited, timeout = time.monotonic() - self._began, self._workers.timeout_seconds
        if waited < self._patience:
            return
        if self._patience > timeout:
            names = [str(task) for task in self._workers.silent("worker")] or self._workers.names()
            raise ClusterError.lost(f"No worker has finished a step for {waited:.0f} s: {', '.join(names)}")
        silent = self._workers.drop_silent()
        if silent:
            warnings.warn(f"Silent for {timeout:g} s: {', '.join(silent)}", stacklevel=2)
        self._patience += max(timeout, SECONDS_TO_GO_ON)


def _named_server(message: str) -> str | None:
    """The parameter server that a message of TensorFlow names, as messages of tfdist do."""
    found = re.search(r"/job:ps/replica:0/task:(\d+)", message)
    return f"ps {found[1]}" if found else None
