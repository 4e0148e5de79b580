"""The progress of `tfdist compare`: the current run, the number of runs, and the expected remaining time."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tfdist import terminal
from tfdist.study.measure import Measured, Turn


class Display:
    """A line that changes on a terminal, and a line for each finished run.

    Args:
        console: the console to print to.
        runs: the number of all runs.
        done: the number of runs that were made earlier.
    """

    def __init__(self, console: Console, runs: int, done: int):
        self._console = console
        self._runs = runs
        self._done = done
        self._turn: Turn | None = None
        self._remaining: float | None = None
        self._started = 0.0
        self._live = Live(get_renderable=self._line, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, turn: Turn, remaining_seconds: float | None) -> None:
        """Shows that a run begins; it and the later runs are expected to take `remaining_seconds`."""
        self._turn, self._remaining, self._started = turn, remaining_seconds, time.monotonic()

    def end(self, measured: Measured) -> None:
        """Prints the result of the current run."""
        assert self._turn is not None
        self._done += 1
        failed = measured.exit_code != 0
        result = f"failed: {terminal.cause(measured.error)}" if failed else f"{measured.wall_seconds:.1f} s"
        self._console.print(Text(f"{self._position(self._done)} {self._turn.title}: {result}"), soft_wrap=True)

    def _line(self) -> Text:
        return Text("" if self._turn is None else f"{self._position(self._done + 1)} {self._turn.title} ...")

    def _position(self, number: int) -> str:
        """The number of a run with the remaining time, such as `[3/20, 0:05:00 left]`."""
        if self._remaining is None:
            return f"[{number}/{self._runs}]"
        seconds = max(0.0, self._remaining - (time.monotonic() - self._started))
        return f"[{number}/{self._runs}, {timedelta(seconds=round(seconds))} left]"
