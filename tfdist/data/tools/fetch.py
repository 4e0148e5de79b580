"""Fetches a dataset, and ends: `python -m tfdist.data.tools.fetch NAME [FOLDER [OPTION=VALUE ...]]`.

It runs before the processes of a job start."""

from __future__ import annotations

import sys

from tfdist import data, registry
from tfdist.errors import TfdistError


def main(name: str, data_dir: str = "", *options: str) -> int:
    """Makes sure that the dataset lies on the disk, and returns the exit code."""
    try:
        data.load(name, data_dir or None, **registry.parse_options(options, "OPTION"))
    except TfdistError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
