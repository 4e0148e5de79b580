"""Ends the collective operations of this process when one of them has waited too long for other processes.

TensorFlow's own timeout of a collective blocks a thread for the whole timeout, even if the collective ends sooner
(`timeout_seconds` in the documentation of `tf.distribute.experimental.CommunicationOptions`). A thousand collectives
per second with a timeout of one minute need 60,000 threads, more than a process can have. Here one thread watches all
of them.

Synopsis:

    counter = CollectiveCounter()
    tensorflow_internals.around_collectives(counter.around)
    watch = Watch(seconds=60.0, counts=counter.counts, abort=tensorflow_internals.abort_collectives)
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

LOOKS = 20  # how many looks without progress a timeout consists of, at least
LONGEST_SECONDS_BETWEEN_LOOKS = 1.0


class Patience:
    """Counts looks without progress instead of time, so that time in which this process was stopped does not count.

    Args:
        seconds: how long there may be no progress.

    Attributes:
        between_looks_seconds: how long to wait for the next look.
    """

    def __init__(self, seconds: float):
        self.between_looks_seconds = min(seconds / LOOKS, LONGEST_SECONDS_BETWEEN_LOOKS)
        self._seconds = seconds
        self._looks = 0

    def ends(self, moved: bool) -> bool:
        """Counts a look; returns whether there has been no progress for too long."""
        self._looks = 0 if moved else self._looks + 1
        return self._looks * self.between_looks_seconds >= self._seconds


class Watch:
    """Calls `abort` when collectives are running and there is no progress.

    Args:
        seconds: how long collectives may run while none begins or ends.
        counts: returns how many collectives have begun, and how many have ended.
        abort: ends the collectives; called with the reason.

    Attributes:
        excused: called before `abort`; if it returns true, the watch waits for the same time again.
    """

    def __init__(self, seconds: float, counts: Callable[[], tuple[int, int]], abort: Callable[[str], None]):
        self.counts = counts
        self.excused: Callable[[], bool] = lambda: False
        self._seconds = seconds
        self._abort = abort
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-waiting", daemon=True)
        self._thread.start()
        # A thread must not read TensorFlow's variables while TensorFlow shuts down.
        atexit.register(self.close)

    def close(self) -> None:
        """Stops watching."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        patience, counts_before = Patience(self._seconds), (0, 0)
        while not self._closed.wait(patience.between_looks_seconds):
            counts = self.counts()
            waits = counts == counts_before and counts[1] < counts[0]
            counts_before = counts
            if patience.ends(moved=not waits):
                if not self.excused():
                    self._abort(f"a collective operation has waited {self._seconds:g} s for the other processes")
                    return
                patience = Patience(self._seconds)
