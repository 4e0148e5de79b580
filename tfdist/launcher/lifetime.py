"""Ties the life of a process to that of its parent, and collects its orphaned descendants: Linux' prctl(2)."""

from __future__ import annotations

import ctypes

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Loaded here, so that a child that was just forked only calls a function of C.
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent(signal_number: int) -> None:
    """Sends this signal to the process when the thread that started it ends; called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


def adopt_descendants() -> None:
    """Makes descendants whose parents end children of this process, which can then end them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
