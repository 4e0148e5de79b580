"""Runs the user's program as `python` does, but prints a tfdist error as one sentence and exits with its code.

`python -m tfdist.launcher.script script.py ARGS`, or `... -m module ARGS`.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

from tfdist import startup
from tfdist.errors import TfdistError, UsageError
from tfdist.jobs import elastic, job_environment, process_exit
from tfdist.jobs.world import World
from tfdist.launcher import resources


def main(arguments: list[str]) -> None:
    """Runs `arguments` as `python` would."""
    if job_environment.SHARE_CORES in os.environ:
        world = World.detect(os.environ)
        all_cores = os.sched_getaffinity(0)
        cores = resources.share_of(sorted(all_cores), world.local_rank, world.local_world_size)
        os.sched_setaffinity(0, cores or all_cores)
    if job_environment.ELASTIC in os.environ:
        elastic.listen()
    startup.prepare_imports()
    try:
        _require_program(*arguments[:2])
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = str(Path(arguments[0]).resolve().parent)
            runpy.run_path(arguments[0], run_name="__main__")
    except TfdistError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        process_exit.fail(error.exit_code)
        sys.exit(error.exit_code)


def _require_program(first: str, second: str = "") -> None:
    """Raises `UsageError` if the script `first`, or after `-m` the module `second`, is not there."""
    if first == "-m":
        if importlib.util.find_spec(second.partition(".")[0]) is None:
            raise UsageError(f"There is no module `{second}`", "correct the name after `-m`, or start in its folder")
    elif not Path(first).exists():
        raise UsageError(f"There is no program `{first}` in `{Path.cwd()}`", "correct the path, or start in its folder")


if __name__ == "__main__":
    main(sys.argv[1:])
