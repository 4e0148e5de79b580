"""How the workers of an elastic job change: all processes leave at a checkpoint, and the launcher starts new ones.

    launcher    when the hosts have changed: sends SIGURG to the chief, until the job has ended
    chief       notes the signal; all processes continue to train
    all         save a checkpoint, compare whether any was asked to leave, and leave with exit code 75
    launcher    starts the job on the current hosts; it resumes from that checkpoint

The signal does not harm a process that does not listen yet because it is still starting. If a process is killed, the
steps since the last checkpoint are lost: the launcher ends the others, and starts the job without it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from tfdist.errors import EXIT_RESHAPED
from tfdist.jobs import consensus

SIGNAL = signal.SIGURG

_listening = False
_told = False


def listen() -> None:
    """Makes this process note when the launcher asks it to leave."""
    global _listening
    _listening = True
    signal.signal(SIGNAL, _note)


def leave_if_told(peers: consensus.Peers, finish: Callable[[], None]) -> None:
    """Ends every process of the job if any was asked to leave; all processes call it after a checkpoint.

    `finish` waits for the checkpoint.
    """
    if _listening and consensus.any_of(peers, _told):
        finish()
        raise SystemExit(EXIT_RESHAPED)


def _note(number: int, frame: Any) -> None:
    global _told
    _told = True
