"""How the processes of an elastic job make way for other workers: all of them leave at a checkpoint.

    launcher    the hosts have changed: SIGURG to the chief, until the job has ended
    chief       notes it                                            all   train on
    all         save a checkpoint, ask whether one was told to      leave with exit code 75
    launcher    starts the job on the hosts that there are now; it resumes from that checkpoint

Whoever does not listen is not harmed by that signal, as one that is only starting. A process that is killed costs the
steps since the last checkpoint: the launcher ends the others, and starts the job without it.
"""

from __future__ import annotations

import signal
from typing import Any

from tfdist.cluster import consensus
from tfdist.errors import EXIT_RESHAPED

SIGNAL = signal.SIGURG

_listening = False
_told = False


def listen() -> None:
    """From now on this process notes that it was told to leave."""
    global _listening
    _listening = True
    signal.signal(SIGNAL, _note)


def leave_if_told(peers: consensus.ProcessGroup) -> None:
    """Ends every process of the job where one of them was told to leave; all call it, behind a checkpoint."""
    if _listening and consensus.any_of(peers, _told):
        raise SystemExit(EXIT_RESHAPED)


def _note(number: int, frame: Any) -> None:
    global _told
    _told = True
