"""The program of a process that calls a function: `python -m tfdist.launcher.call FOLDER`."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from tfdist.errors import ClusterError, TfdistError
from tfdist.jobs import process_exit
from tfdist.jobs.world import World
from tfdist.launcher.function import Outcome, read_call, write_outcome


def main(folder: Path) -> None:
    """Calls the function in `folder`, writes the outcome there, and ends the process if the function failed.

    The caller shows the error, so that it is not printed here.
    """
    world = World.detect(os.environ)
    name = world.named(world.rank)
    try:
        value = read_call(folder)()
        write_outcome(folder, world.rank, Outcome(value, unix_seconds=time.time()))
    except Exception as error:
        write_outcome(folder, world.rank, _failure(name, error))
        code = error.exit_code if isinstance(error, TfdistError) else 1
        process_exit.fail(code)
        sys.exit(code)


def _failure(name: str, error: Exception) -> Outcome:
    sentence = error.sentence if isinstance(error, TfdistError) else str(error)
    return Outcome(
        error=f"{name} raised `{type(error).__name__}`" + (f": {sentence}" if sentence else ""),
        hint=error.hint if isinstance(error, TfdistError) else None,
        traceback="".join(traceback.format_exception(error)),
        is_consequence=type(error) is ClusterError,
        unix_seconds=time.time(),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
