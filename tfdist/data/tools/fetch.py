"""Downloads and prepares a dataset: `python -m tfdist.data.tools.fetch NAME [FOLDER [OPTION=VALUE ...]]`.

The launcher runs it before the processes of a job start.
"""

from __future__ import annotations

import sys

from tfdist import data, registry, terminal


def main(name: str, data_dir: str = "", *options: str) -> None:
    """Makes sure that the dataset is on the disk."""
    with terminal.exit_on_error():
        data.load(name, data_dir or None, **registry.parse_options(options, "OPTION"))


if __name__ == "__main__":
    main(*sys.argv[1:])
