"""What a command shows and what goes to its log.

TensorFlow's C++ code writes to file descriptor 2 whatever its log level, so the descriptor itself is pointed at the
run's log, and messages for the user go to a copy of the terminal's. The log holds these messages too, and what is
written to standard output: all that the run said.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import click

from tfdist.errors import EXIT_INTERRUPTED, CostWarning, DifferenceWarning, TfdistError

# Where messages for the user go; the last one holds.
_terminal: list[TextIO] = [sys.stderr]
STDOUT, STDERR = 1, 2


@contextlib.contextmanager
def logged_to(log: Path | None) -> Iterator[TextIO]:
    """Sends what is written to standard error to `log`, and copies there what the user is shown; yields the terminal.

    What is written to the terminal, and to standard output, is shown and copied. `None` changes nothing.
    """
    if log is None:
        yield sys.stderr
        return
    sys.stderr.flush()
    shown = os.fdopen(os.dup(STDERR), "w", buffering=1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, STDERR)
    terminal, stdout = cast(TextIO, _Copied(shown, file)), sys.stdout
    sys.stdout = cast(TextIO, _Copied(stdout, file))
    _terminal.append(terminal)
    show = warnings.showwarning
    warnings.showwarning = functools.partial(_show_differences, show)
    try:
        yield terminal
    finally:
        warnings.showwarning = show
        _terminal.remove(terminal)
        sys.stdout = stdout
        sys.stderr.flush()
        os.dup2(shown.fileno(), STDERR)
        shown.close()
        os.close(file)


def _show_differences(show: Callable[..., None], message: Any, category: type[Warning], *where: Any) -> None:
    """Logs a warning by `show`; one of a difference or of a cost is shown instead, and copied."""
    if issubclass(category, DifferenceWarning | CostWarning):
        say(f"warning: {message}")
    else:
        show(message, category, *where)


class _Copied:
    """A stream whose whole lines are written to the file descriptor `log` too, as they stand when they end."""

    def __init__(self, stream: TextIO, log: int):
        self._stream = stream
        self._log = log
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            with contextlib.suppress(OSError):  # a full disk is told by what must be written
                os.write(self._log, f"{_as_it_stands(line)}\n".encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _as_it_stands(line: str) -> str:
    """A line of a terminal without colours, and without what was overwritten, such as the states of a progress bar."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\x08", "", line).rstrip("\r")
    return plain.rpartition("\r")[2].rstrip()


def counted(number: int, thing: str) -> str:
    """A number of things in words: `1 epoch`, `2 epochs`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def cause(said: str) -> str:
    """The line that tells most of what a failed command has said; "" if it said nothing."""
    lines = [line for line in said.splitlines() if line.strip()] or [""]
    errors = [index for index, line in enumerate(lines) if line.startswith("error:")]
    if not errors:
        return lines[-1]
    # An unexpected error is preceded by its traceback, whose last line has the exception.
    first = errors[0]
    return lines[first - 1] if first and lines[first].startswith("error: unexpected") else lines[first]


def say(line: str) -> None:
    """Shows a line to the user, from any thread."""
    with contextlib.suppress(OSError):
        print(line, file=_terminal[-1], flush=True)


@contextlib.contextmanager
def guarded_stdout(needed: bool = False) -> Iterator[None]:
    """Within it standard output may be closed or full: that is told once, and what is written there leads nowhere.

    Args:
        needed: the program is there for its output, and ends with exit code 1 where that is lost.
    """
    closed = sys.stdout is None
    _open_standard_streams()
    before = sys.stdout
    stdout = _AnyStdout(before, needed)
    sys.stdout = cast(TextIO, stdout)
    if closed:
        stdout.lose("it is closed")
    try:
        yield
    finally:
        sys.stdout = before
        stdout.flush()


def _open_standard_streams() -> None:
    """Has what was closed when the process began lead nowhere: the next file that is opened would take its place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", closefd=False)
        _terminal[0] = sys.stderr


class _AnyStdout:
    """Standard output, as long as it takes what is written."""

    def __init__(self, stream: TextIO, needed: bool):
        self._stream = stream
        self._needed = needed

    def write(self, text: str) -> int:
        with self._losing():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._losing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def lose(self, reason: str) -> None:
        """Tells it; from now on whatever writes there, such as a library, writes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        say(f"Standard output cannot be written ({reason}): nothing is shown there.")
        if self._needed:
            sys.exit(1)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lose(error.strerror or str(error))


@contextlib.contextmanager
def interrupts_noticed_by(notice: Callable[[], None]) -> Iterator[None]:
    """Calls `notice` at Ctrl-C, before `KeyboardInterrupt` is raised as usual.

    An exception that is raised while an object is being deleted, or inside a callback of C code, is lost, and so would
    be the interrupt.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        notice()
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class GroupedOption(click.Option):
    """An option that the help lists under the heading `group`."""

    def __init__(self, *args: Any, group: str, **named: Any):
        super().__init__(*args, **named)
        self.group = group


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Ends the program where an error of tfdist's is raised, which is shown as its sentence and its hint."""
    try:
        yield
    except TfdistError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


class Command(click.Command):
    """A command that returns its exit code, or `None` for 0, and shows errors of tfdist's without a traceback.

    Its help lists the options under their headings, in the order in which these come first.
    """

    def make_context(self, *args: Any, **named: Any) -> click.Context:
        with exit_on_error():
            return super().make_context(*args, **named)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option

    def invoke(self, ctx: click.Context) -> None:
        try:
            with exit_on_error():
                code = super().invoke(ctx)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        sys.exit(code or 0)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=38)


def _show_help(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    del option
    if wanted and not ctx.resilient_parsing:
        with guarded_stdout(needed=True):
            click.echo(ctx.get_help())
        ctx.exit()


def options_of(group: str) -> Callable[..., Any]:
    """`click.option` for options that the help lists under the heading `group`."""

    def option(*names: str, **named: Any) -> Callable[..., Any]:
        return click.option(*names, cls=GroupedOption, group=group, **named)

    return option


# So wide that names and values stay whole.
HELP_WIDTH = 110
