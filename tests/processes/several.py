"""Runs scripts one after the other in each process of a job, so that a job is started once for all of them.

What script NAME prints in a process is in FOLDER/NAME.RANK.txt once it has ended; its error, which ends the job, in
FOLDER/NAME.RANK.error.

Usage, below the launcher: python -m tests.processes.several FOLDER '[["NAME", ["ARGUMENT", ...]], ...]'
"""

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

from tfdist.jobs.world import World


def main():
    folder, rank = Path(sys.argv[1]), World.detect(os.environ).rank
    for name, arguments in json.loads(sys.argv[2]):
        sys.argv = [name, *arguments]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        except BaseException:
            (folder / f"{name}.{rank}.error").write_text(printed.getvalue() + traceback.format_exc())
            raise
        (folder / f"{name}.{rank}.txt").write_text(printed.getvalue())


if __name__ == "__main__":
    main()
