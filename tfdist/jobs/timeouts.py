"""How long the processes of a job wait for each other, from options and the environment."""

from __future__ import annotations

import os

from tfdist.jobs.job_environment import START_SECONDS
from tfdist.options import checked_seconds


def start_timeout_seconds(option: float | None) -> float:
    """How long the start waits for all processes: `option`, else the launcher's setting, else 60.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    if option is not None:
        return checked_seconds("start_timeout_seconds", option)
    return checked_seconds(START_SECONDS, os.environ.get(START_SECONDS, "60"))


def callback_timeout_seconds(option: float | None) -> float | None:
    """How long a process may be busy while others wait for it; `None` sets no limit.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    return None if option is None else checked_seconds("callback_timeout_seconds", option)
