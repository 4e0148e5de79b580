"""What `compare` shows while it measures: which run is under way, how many are left, and how long they will take."""

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
        console: where it is shown.
        runs: how many runs there are in all.
        done: how many of them were made before.
    """

    def __init__(self, console: Console, runs: int, done: int):
        self._console = console
        self._runs = runs
        self._done = done
        self._turn: Turn | None = None
        self._left: float | None = None
        self._began = 0.0
        self._live = Live(get_renderable=self._line, console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def begin(self, turn: Turn, left_seconds: float | None) -> None:
        """A run begins; with those after it, it is expected to take so long."""
        self._turn, self._left, self._began = turn, left_seconds, time.monotonic()

    def end(self, found: Measured) -> None:
        """The run has ended."""
        assert self._turn is not None
        self._done += 1
        how = f"{found.wall_seconds:.1f} s" if found.exit_code == 0 else f"failed: {terminal.cause(found.error)}"
        left = "" if self._left is None else f", {self._rest()} left"
        self._console.print(Text(f"[{self._done}/{self._runs}{left}] {self._turn.title}: {how}"), soft_wrap=True)

    def _line(self) -> Text:
        if self._turn is None:
            return Text("")
        left = "" if self._left is None else f", {self._rest()} left"
        return Text(f"[{self._done + 1}/{self._runs}{left}] {self._turn.title} ...")

    def _rest(self) -> str:
        left = max(0.0, (self._left or 0.0) - (time.monotonic() - self._began))
        return str(timedelta(seconds=round(left)))
