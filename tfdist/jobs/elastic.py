"""How the workers of an elastic job change: all processes end at a checkpoint, and the launcher starts new ones.

    launcher    when the hosts have changed: sends SIGURG to the chief, until the job has ended
    chief       notes the signal; all processes continue to train
    all         save a checkpoint, check whether any process received the signal, and end with exit code 75
    launcher    starts the job on the current hosts; it resumes from that checkpoint

The signal does no harm to a process that is still starting, and does not listen yet. If a process is killed, the steps
since the last checkpoint are lost: the launcher ends the others, and starts the job without it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from tfdist.errors import EXIT_RESHAPED
from tfdist.jobs import consensus

SIGNAL = signal.SIGURG

_is_listening = False
_was_signaled = False


def listen() -> None:
    """Makes this process note the launcher's signal."""
    global _is_listening
    _is_listening = True
    signal.signal(SIGNAL, _note)


def end_if_signaled(peers: consensus.Peers, finish: Callable[[], None]) -> None:
    """Ends every process of the job if any of them was signaled; all processes call it after a checkpoint.

    `finish` waits for the checkpoint.
    """
    if _is_listening and consensus.any_of(peers, _was_signaled):
        finish()
        raise SystemExit(EXIT_RESHAPED)


def _note(number: int, frame: Any) -> None:
    global _was_signaled
    _was_signaled = True
