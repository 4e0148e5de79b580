"""The exceptions of tfdist, as one tree; a command turns one into a message and an exit code.

    TfdistError                  exit code 2: the user's input, or the machine, needs a change
    ├── UsageError               an option or argument that cannot work (also a ValueError)
    │   └── UnknownNameError     a name that is not registered; lists the known ones
    ├── DataError                a dataset that is missing, empty or inconsistent
    ├── NonFiniteLossError       the loss became NaN or infinite at a step
    ├── VerificationError        steps on several replicas differ from those of one device
    ├── CheckpointError          no usable checkpoint, or one that cannot be written
    ├── RunFolderError           a run folder that cannot be written or read
    └── ClusterError             a process of the job is missing, has died or does not answer; exit code 3
        └── DisagreementError    processes of a job have different settings; exit code 2

Synopsis:

    >>> error = UnknownNameError("strategy", "miror", ["custom", "mirrored", "single"])
    >>> print(error)
    Unknown strategy `miror`: the names are `custom`, `mirrored`, `single`
    <BLANKLINE>
    hint: did you mean `mirrored`?
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

EXIT_USAGE = 2
EXIT_CLUSTER = 3
EXIT_RESHAPED = 75  # the processes of an elastic job ask to be restarted; `EX_TEMPFAIL` of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class TfdistError(Exception):
    """One sentence with what was set and what was found, and a hint with what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, sentence: str, hint: str):
        super().__init__(f"{sentence}\n\nhint: {hint}")
        self.sentence = sentence
        self.hint = hint


class UsageError(TfdistError, ValueError):
    """An option or argument that cannot work."""


class UnknownNameError(UsageError):
    """A name that is not registered under its kind."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str | None = None):
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        names = ", ".join(f"`{k}`" for k in known)
        hint = hint or (f"did you mean `{near[0]}`?" if near else f"use one of {names}")
        super().__init__(f"Unknown {kind} `{name}`: the names are {names}", hint)


class DataError(TfdistError):
    """A dataset that is missing, empty or inconsistent."""


class NonFiniteLossError(TfdistError):
    """The loss became NaN or infinite."""


class VerificationError(TfdistError):
    """Steps on the replicas of a strategy differ from those of one device by more than rounding.

    Attributes:
        layer: the layer, metric, loss or model with the first difference.
        report: the `tfdist.core.verification_report.Report`.
    """

    def __init__(self, sentence: str, hint: str, layer: str, report: object):
        super().__init__(sentence, hint)
        self.layer = layer
        self.report = report


class CheckpointError(TfdistError):
    """No usable checkpoint, or one that cannot be written."""


class RunFolderError(TfdistError):
    """A run folder that cannot be written or read."""


class ClusterError(TfdistError):
    """A process of the job is missing, has died or does not answer."""

    exit_code = EXIT_CLUSTER

    @classmethod
    def lost(cls, sentence: str) -> ClusterError:
        """The error for the loss of processes that were there when the job began."""
        return cls(
            sentence,
            "see that process' own output; start the job again with `--resume`, or a script of your own with "
            "`Checkpoint(..., resume=True)`",
        )


class DisagreementError(ClusterError):
    """Processes of a job have different settings."""

    exit_code = EXIT_USAGE

    @classmethod
    def among(cls, settings_by_rank: Mapping[str, Mapping[str, object]]) -> DisagreementError | None:
        """The error that shows the value of each process for each setting that differs; `None` if none differs.

        `settings_by_rank` has the settings of each process, by a name of the process such as "rank 1".
        """
        lines = []
        for name in dict.fromkeys(name for settings in settings_by_rank.values() for name in settings):
            values = {who: settings.get(name) for who, settings in settings_by_rank.items()}
            if len(set(values.values())) > 1:
                lines.append(f"`{name}`: {grouped(values, _has)}")
        if not lines:
            return None
        return cls(
            "The processes of the job disagree on " + "; on ".join(lines),
            "start all of them with the same command, data and versions",
        )


MOST_NAMED, MOST_GROUPS = 3, 6


def grouped(values: Mapping[str, Hashable], told: Callable[[str, Any, bool], str]) -> str:
    """Which processes have which value: `told(who, value, one)` of each group of equal values, the first ones of many.

    Args:
        values: by a name of the process, in the order of the ranks.
        told: how a group is told; `who` names its processes, and `one` says whether it is a single one.

    >>> print(grouped({f"worker {rank}": rank == 7 for rank in range(512)}, lambda who, value, one: f"{who}: {value}"))
    worker 0 and 510 others: False, worker 7: True
    """
    groups: dict[Hashable, list[str]] = {}
    for who, value in values.items():
        groups.setdefault(value, []).append(who)
    shown = [told(_joined(names), value, len(names) == 1) for value, names in [*groups.items()][:MOST_GROUPS]]
    left = len(groups) - len(shown)
    return ", ".join([*shown, *[f"and {left} other values"] * (left > 0)])


def _joined(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED:
        return f"{names[0]} and {len(names) - 1} others"
    return " and ".join(names)


def _has(who: str, value: Any, one: bool) -> str:
    return f"{who} {'has' if one else 'have'} `{value}`"
