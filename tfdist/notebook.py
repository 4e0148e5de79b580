"""Starts a job of several processes from a notebook.

    def train(epochs):
        strategy = tfdist.strategy("multiworker")
        ...
        return model.evaluate(x, y)

    tfdist.launch_notebook(train, args=(3,), workers=2)

The processes are new ones, started by `python -m tfdist.launch`, so what the notebook has imported or created does not
matter, except for memory of GPUs.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist.errors import EXIT_USAGE, ClusterError, TfdistError, UsageError
from tfdist.launcher import call, lifetime
from tfdist.launcher import function as calls
from tfdist.options import checks_arguments

CHUNK_BYTES = 1 << 16


class _RemoteError(Exception):
    """The traceback of another process, shown as the cause of an error."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@checks_arguments
def launch_notebook(function: Callable[..., Any], args: Sequence[Any] = (), workers: int = 2, ps: int = 0) -> list[Any]:
    """Calls `function(*args)` in each process of a job on this machine, and shows what the processes print.

    Lines of the chief appear as they are, and those of the others with their name in front, such as `[worker 1]`.
    Interrupting the cell ends the processes.

    Args:
        function: creates its strategy, and trains with it; it may be defined in the notebook.
        args: its arguments, which are pickled.
        workers: the number of worker processes.
        ps: the number of parameter servers.

    Returns:
        What the function returned, by rank.

    Raises:
        UsageError: the function cannot be sent to other processes, or TensorFlow holds the GPUs.
        TfdistError: the function raised an error in a process, which is named; the cause is the traceback there. Or it
            ended a process.
        ClusterError: a process ended in another way.
    """
    if workers < 1 or ps < 0:
        raise UsageError(f"`workers` is {workers} and `ps` is {ps}", "use 1 or more, and 0 or more")
    _refuse_held_gpus()
    count = workers + ps + bool(ps)  # with parameter servers, the chief is an additional process
    pickled = calls.pickled(function, args, {})
    folder = Path(tempfile.mkdtemp(prefix="tfdist-notebook-"))
    calls.write_call(folder, pickled)
    options = ["--workers", str(workers), "--ps", str(ps), "--log-dir", str(folder / "logs"), "--verbose"]
    code = _run([sys.executable, "-m", "tfdist.launch", *options, "-m", call.__name__, str(folder)])
    ended = calls.outcomes(folder, count)
    if code == 0:  # otherwise the launcher has named the folder of the logs
        shutil.rmtree(folder)
    failure = calls.first_failure(ended)
    if failure is not None:
        hint = failure.hint or "the traceback above shows where"
        raise TfdistError(failure.error or "", hint) from _RemoteError(failure.traceback)
    if code:
        kind = UsageError if code == EXIT_USAGE else ClusterError
        raise kind(f"The job ended with exit code {code}", "the output above has the reason")
    # The chief alone calls the function to its end if there are parameter servers.
    silent = [rank for rank in range(1 if ps else workers) if ended[rank] is None]
    if silent:
        raise TfdistError(
            f"The function `{calls.name(function)}` ended process {silent[0]} with exit code 0 instead of returning",
            "leave out `sys.exit`, or return instead",
        )
    return [outcome.value if outcome else None for outcome in ended]


def _refuse_held_gpus() -> None:
    tf = sys.modules.get("tensorflow")
    if tf is None:
        return
    from tfdist.internals import tensorflow as tensorflow_internals

    if tensorflow_internals.runtime_started() and tf.config.list_physical_devices("GPU"):
        raise UsageError(
            "TensorFlow has started in this notebook, and holds the memory of the GPUs that the processes need",
            "restart the kernel, and call `launch_notebook` before a tensor or a strategy exists",
        )


def _run(command: Sequence[str]) -> int:
    """Runs the launcher, shows its output, and returns its exit code."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: lifetime.end_with_parent(signal.SIGTERM),  # noqa: PLW1509 - it calls one C function
    ) as launcher:
        assert launcher.stdout is not None
        try:
            _show(launcher.stdout.fileno())
        except BaseException:  # such as an interrupted cell
            launcher.send_signal(signal.SIGINT)
            with contextlib.suppress(KeyboardInterrupt):
                _show(launcher.stdout.fileno())
            raise
        return launcher.wait()


def _show(output: int) -> None:
    # A progress bar is shown while it grows, so what is read ends anywhere.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := os.read(output, CHUNK_BYTES):
        sys.stdout.write(decoder.decode(chunk))
        sys.stdout.flush()
