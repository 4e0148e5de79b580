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
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

EXIT_DIFFERENT = 1  # a verification has found a difference
EXIT_USAGE = 2
EXIT_CLUSTER = 3
EXIT_RESHAPED = 75  # the processes of an elastic job ask to be restarted; `EX_TEMPFAIL` of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
# Values that a message about differing processes shows.
MOST_VALUES = 8


class TfdistError(Exception):
    """One sentence with what was set and what was found, and a hint with what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, sentence: str, hint: str | None = None):
        if hint is None:
            sentence, hint = _in_layer(sentence)
        super().__init__(f"{sentence}\n\nhint: {hint}")
        self.sentence = sentence
        self.hint = hint


def _in_layer(message: str) -> tuple[str, str]:
    """The sentence and the hint of an error that Keras has made again, from its message, where a layer raised it."""
    found = _OF_LAYER.fullmatch(message)
    return (f"{found['sentence']} (in `{found['layer']}`)", found["hint"]) if found else (message, "see above")


# As in Keras 3.15.1, `keras.src.utils.traceback_utils.inject_argument_info_in_traceback`.
_OF_LAYER = re.compile(
    r"Exception encountered when calling (?P<layer>.*?)\(?\)?\.\n\n"
    r"\x1b\[1m(?P<sentence>.*?)\n\nhint: (?P<hint>.*?)\x1b\[0m\n\n.*",
    re.DOTALL,
)


class DifferenceWarning(UserWarning):
    """What is computed is not what one device computes; commands show it, and do not only log it."""


class CostWarning(UserWarning):
    """Every replica repeats much of a step; commands show it, and do not only log it."""


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
    """Steps on the replicas of a strategy differ from those of one device by more than rounding, or break its bound.

    Attributes:
        layer: the layer, metric, loss or model with the first difference.
        report: the `tfdist.verification.report.Report`, or a `BoundReport`.
    """

    exit_code = EXIT_DIFFERENT

    def __init__(self, sentence: str, hint: str, layer: str, report: Any):
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
    def among(
        cls, settings_by_rank: Mapping[int, Mapping[str, object]], named: Callable[[Collection[int]], str]
    ) -> DisagreementError | None:
        """The error that shows, for each setting that differs, the values and the processes that have them.

        Args:
            settings_by_rank: the settings of each process.
            named: how the message names some ranks.

        Returns:
            The error, or `None` if no setting differs.
        """
        names = dict.fromkeys(name for settings in settings_by_rank.values() for name in settings)
        lines = []
        for name in names:
            values = {rank: settings.get(name) for rank, settings in settings_by_rank.items()}
            if len(set(values.values())) > 1:
                lines.append(f"`{name}`: " + by_value(values, named, "{ranks} {have} `{value}`"))
        if not lines:
            return None
        return cls(
            "The processes of the job disagree on " + "; on ".join(lines),
            "start all of them with the same command, data and versions",
        )


def by_value(values: Mapping[int, object], named: Callable[[Collection[int]], str], template: str) -> str:
    """The values of processes in one phrase, in which those with equal values are named together.

    Args:
        values: the value of each process, by rank.
        named: how the phrase names some ranks.
        template: says one value, with the fields `ranks`, `have` (or "has") and `value`.
    """
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    shown = [
        template.format(ranks=named(ranks), have="has" if len(ranks) == 1 else "have", value=value)
        for value, ranks in list(groups.items())[:MOST_VALUES]
    ]
    rest = len(groups) - MOST_VALUES
    return ", ".join(shown) + (f", and there are {rest} more values" if rest > 0 else "")
