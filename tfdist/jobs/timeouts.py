"""How long the processes of a job wait for each other, as options and the environment say."""

from __future__ import annotations

import os

from tfdist.jobs import job_environment
from tfdist.options import checked_seconds


def start_timeout_seconds(wanted: float | None) -> float:
    """How long the start waits for all processes: `wanted`, else the launcher's setting, else 60.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    if wanted is not None:
        return checked_seconds("start_timeout_seconds", wanted)
    return checked_seconds(job_environment.START_SECONDS, os.environ.get(job_environment.START_SECONDS, "60"))


def callback_timeout_seconds(wanted: float | None) -> float | None:
    """How long a process may be busy while others wait for it; `None` is without limit.

    Raises:
        UsageError: it is not a positive, finite number.
    """
    return None if wanted is None else checked_seconds("callback_timeout_seconds", wanted)
