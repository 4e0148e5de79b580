"""The limit of open files of this process, which its children inherit."""

from __future__ import annotations

import resource

from tfdist.errors import UsageError

OF_THE_PROGRAM = 64  # beside what is counted: libraries, the terminal, and what is open for a moment


def raise_towards(count: int) -> int:
    """Raises the soft limit until `count` files can be open, or to the hard limit; returns the limit."""
    needed = count + OF_THE_PROGRAM
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _at_least(soft, needed):
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if _at_least(hard, needed) else hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def require(count: int, what: str) -> None:
    """Raises the soft limit so that `count` files can be open at the same time.

    Raises:
        UsageError: the hard limit is too low for `what`.
    """
    limit, needed = raise_towards(count), count + OF_THE_PROGRAM
    if not _at_least(limit, needed):
        raise UsageError(
            f"{what} needs {needed} open files, and the limit is {limit}",
            f"raise it with `ulimit -n {needed}`, for which an administrator may first have to raise the hard limit "
            "(`ulimit -Hn`), or start fewer processes on a host",
        )


def _at_least(limit: int, needed: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= needed
