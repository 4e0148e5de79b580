"""The output of commands: messages for the user, log files, and the base class of commands.

TensorFlow's C++ code writes to file descriptor 2 regardless of its log level, so that descriptor is redirected to the
run's log, and messages for the user go to a copy of the terminal's descriptor. The log also contains these messages and
standard output.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

import click

from tfdist.command_line import mistakes, options
from tfdist.errors import (
    EXIT_INTERRUPTED,
    CheckpointWarning,
    CostWarning,
    DifferenceWarning,
    JobWarning,
    TfdistError,
    UnknownNameError,
    printable,
)

# A stack of streams for messages to the user; the last stream is in use.
_terminal: list[TextIO] = [sys.stderr]
STDOUT, STDERR = 1, 2
HELP_WIDTH = 110  # wide enough to keep names and values on one line
options_of = options.grouped_by


@contextlib.contextmanager
def logged_to(log: Path | None) -> Iterator[TextIO]:
    """Redirects standard error to `log`, and yields a stream for the terminal.

    Text for that stream and for standard output is shown and copied to `log`. `None` changes nothing.
    """
    if log is None:
        yield sys.stderr
        return
    sys.stderr.flush()
    shown = os.fdopen(os.dup(STDERR), "w", buffering=1)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, STDERR)
    terminal, stdout = cast(TextIO, _LoggedStream(shown, file)), sys.stdout
    sys.stdout = cast(TextIO, _LoggedStream(stdout, file))
    _terminal.append(terminal)
    show = warnings.showwarning
    warnings.showwarning = functools.partial(_show_warning, show)
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


@contextlib.contextmanager
def without_native_messages() -> Iterator[None]:
    """Drops what C++ code writes to file descriptor 2, such as TensorFlow's messages at its start."""
    _open_standard_streams()
    sys.stderr.flush()
    shown, stderr = os.fdopen(os.dup(STDERR), "w", buffering=1), sys.stderr
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), STDERR)
    if stderr is _terminal[0]:  # and not a program's own stream
        sys.stderr = shown
    _terminal.append(shown)
    try:
        yield
    finally:
        _terminal.remove(shown)
        sys.stderr = stderr
        os.dup2(shown.fileno(), STDERR)
        shown.close()


def _show_warning(show: Callable[..., None], message: Any, category: type[Warning], *where: Any) -> None:
    """Shows the user a warning of a class that tfdist defines, and passes other warnings to `show`."""
    if issubclass(category, DifferenceWarning | CostWarning | CheckpointWarning | JobWarning):
        say(f"warning: {printable(str(message))}")
    else:
        show(message, category, *where)


class _LoggedStream:
    """A stream that also writes each complete line to the file descriptor `log`."""

    def __init__(self, stream: TextIO, log: int):
        self._stream = stream
        self._log = log
        self._incomplete = ""

    def write(self, text: str) -> int:
        *lines, self._incomplete = (self._incomplete + text).split("\n")
        for line in lines:
            with contextlib.suppress(OSError):  # more important files report a full disk
                os.write(self._log, f"{_final_text(line)}\n".encode(errors="replace"))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _final_text(line: str) -> str:
    """A line without colours and without overwritten text, such as earlier states of a progress bar."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\x08", "", line).rstrip("\r")
    return plain.rpartition("\r")[2].rstrip()


def counted(number: int, thing: str) -> str:
    """A number of things in words: `1 epoch`, `2 epochs`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def flops(number: float) -> str:
    """A number of FLOPs with three digits and a prefix: `1.23 GFLOPs`."""
    power = min(max(0, (len(str(int(number))) - 1) // 3), len(_PREFIXES) - 1)
    return f"{number / 1000**power:.3g} {_PREFIXES[power]}FLOPs"


_PREFIXES = ("", "K", "M", "G", "T", "P", "E")


def cause(output: str) -> str:
    """The most informative line in the output of a failed command; empty if there is no output."""
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    first = next((index for index, line in enumerate(lines) if line.startswith("error:")), None)
    if first is None:
        return lines[-1]
    # The line before an unexpected error is the end of its traceback, with the exception.
    return lines[first - 1] if first and lines[first].startswith("error: unexpected") else lines[first]


def descriptor() -> int:
    """The file descriptor on which messages are shown to the user."""
    try:
        return _terminal[-1].fileno()
    except (OSError, ValueError):  # it is a stream of a notebook, or closed
        return STDERR


def say(line: str) -> None:
    """Shows a line to the user. May be called from any thread."""
    with contextlib.suppress(OSError):
        print(line, file=_terminal[-1], flush=True)


@contextlib.contextmanager
def guarded_stdout(needed: bool = False) -> Iterator[None]:
    """Within this context, a closed or full standard output is reported once, and further output is discarded.

    Args:
        needed: output is the purpose of the program, which ends with exit code 1 if the output is lost.
    """
    closed = sys.stdout is None
    _open_standard_streams()
    original = sys.stdout
    stdout = _GuardedStdout(original, needed)
    sys.stdout = cast(TextIO, stdout)
    if closed:
        stdout.discard("it is closed")
    try:
        yield
    finally:
        sys.stdout = original
        stdout.flush()


def _open_standard_streams() -> None:
    """Opens standard streams that are closed as /dev/null; else the next opened file would get their descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STDOUT, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(STDERR, "w", closefd=False)
        _terminal[0] = sys.stderr


class _GuardedStdout:
    """Standard output that is discarded after the first error."""

    def __init__(self, stream: TextIO, needed: bool):
        self._stream = stream
        self._needed = needed

    def write(self, text: str) -> int:
        with self._guarded():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def discard(self, reason: str) -> None:
        """Reports the reason, and redirects the descriptor to /dev/null, for libraries that write to it too."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        say(f"Standard output cannot be written ({reason}): further output is discarded.")
        if self._needed:
            sys.exit(1)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard(error.strerror or str(error))


@contextlib.contextmanager
def interrupts_noticed_by(notice: Callable[[], None]) -> Iterator[None]:
    """Calls `notice` at Ctrl-C, before `KeyboardInterrupt` is raised as usual.

    The exception alone would be lost if it is raised in a destructor or in a callback from C code.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        notice()
        signal.default_int_handler(number, frame)

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Shows an error of tfdist as its sentence and its hint, and ends the program with the error's exit code."""
    try:
        yield
    except TfdistError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


class _InSentences(click.Command):
    """A command whose mistakes are answered by a sentence and a hint; `--batch_size` stands for `--batch-size`."""

    def __init__(self, name: str | None, *, context_settings: Mapping[str, Any] | None = None, **named: Any):
        settings = {
            "help_option_names": ["-h", "--help"],
            "max_content_width": HELP_WIDTH,
            # Of the names of options only; the names of models and modules are not changed.
            "token_normalize_func": lambda token: token.replace("_", "-"),
            **(context_settings or {}),
        }
        super().__init__(name, context_settings=settings, **named)

    def make_context(self, *args: Any, **named: Any) -> click.Context:
        with exit_on_error():
            return super().make_context(*args, **named)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with mistakes.as_sentences(ctx, tuple(args)):
            return super().parse_args(ctx, args)


class Command(_InSentences):
    """A command that returns its exit code, or `None` for 0, and shows errors of tfdist without a traceback.

    Its help, `-h` or `--help`, lists the options under their headings, in the order in which the headings first occur.
    """

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


class EstimateCommand(Command):
    """A command without a log, which shows none of the messages of TensorFlow's C++ code."""

    def invoke(self, ctx: click.Context) -> None:
        with without_native_messages():
            super().invoke(ctx)


def _show_help(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    del option
    if wanted and not ctx.resilient_parsing:
        with guarded_stdout(needed=True):
            click.echo(ctx.get_help())
        ctx.exit()


class Program(_InSentences, click.Group):
    """A program of several commands, whose help lists each command under a heading, with its whole summary.

    Args:
        sections: by heading, where each command is, as "module:attribute", by its name. A command is imported when it
            is called, or when the help lists it.
    """

    def __init__(self, name: str, sections: Mapping[str, Mapping[str, str]], **named: Any):
        super().__init__(name, **named)
        self._sections = sections
        self._places = {name: place for section in sections.values() for name, place in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._command(cmd_name) if cmd_name in self._places else None

    def invoke(self, ctx: click.Context) -> Any:
        with exit_on_error():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self._places and not args[0].startswith("-"):
            raise UnknownNameError("command", args[0], self._places)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self._places))
        for heading, names in self._sections.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", summary(self._command(name))) for name in names])

    def _command(self, name: str) -> click.Command:
        module, _, attribute = self._places[name].partition(":")
        return cast(click.Command, getattr(importlib.import_module(module), attribute))


def summary(command: click.Command) -> str:
    """The first paragraph of a command's help."""
    return " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split())
