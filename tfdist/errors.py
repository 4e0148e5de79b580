"""The exceptions of tfdist. A command shows their message and ends with their exit code.

    TfdistError                  exit code 2: the user's input, or the machine, needs a change
    ├── UsageError               an invalid option or argument (also a ValueError)
    │   ├── UnknownNameError     a name that is not registered; lists the known names
    │   └── MissingPackageError  an optional package that is not installed
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

EXIT_DIFFERENT = 1  # a verification found a difference
EXIT_USAGE = 2
EXIT_CLUSTER = 3
EXIT_RESHAPED = 75  # the processes of an elastic job request a restart; `EX_TEMPFAIL` of sysexits.h
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as reported by shells
MOST_VALUES = 8  # maximum number of different values in a message about processes that disagree


class TfdistError(Exception):
    """An error with a sentence, which says what was set and what was observed, and a hint, which says what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, sentence: str, hint: str | None = None):
        if hint is None:
            sentence, hint = _split_layer_message(sentence)
        sentence, hint = printable(sentence), printable(hint)
        super().__init__(f"{sentence}\n\nhint: {hint}")
        self.sentence = sentence
        self.hint = hint


def enumerated(names: Sequence[str], conjunction: str = "and") -> str:
    """Names as a sentence has them: a, b and c."""
    return f" {conjunction} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def printable(text: str) -> str:
    """Escapes what a terminal would interpret, such as a title for its window; names in messages may be of others."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _split_layer_message(message: str) -> tuple[str, str]:
    """The sentence and the hint in the message of an error that a layer raised and Keras raised again."""
    match = _LAYER_MESSAGE.fullmatch(message)
    return (f"{match['sentence']} (in `{match['layer']}`)", match["hint"]) if match else (message, "see above")


# The format of Keras 3.15.1, `keras.src.utils.traceback_utils.inject_argument_info_in_traceback`.
_LAYER_MESSAGE = re.compile(
    r"Exception encountered when calling (?P<layer>.*?)\(?\)?\.\n\n"
    r"\x1b\[1m(?P<sentence>.*?)\n\nhint: (?P<hint>.*?)\x1b\[0m\n\n.*",
    re.DOTALL,
)


class DifferenceWarning(UserWarning):
    """The computation differs from that of one device. Commands show this warning instead of only logging it."""


class CostWarning(UserWarning):
    """A computation costs more than it has to. Commands show this warning instead of only logging it."""


class JobWarning(UserWarning):
    """A process trains alone, and was probably not meant to. Commands show this warning instead of only logging it."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and an earlier one is used. Commands show this warning instead of only logging it."""


class UsageError(TfdistError, ValueError):
    """An invalid option or argument."""


class UnknownNameError(UsageError):
    """A name that is not registered under its kind."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str | None = None):
        known = sorted(known)
        similar = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        names = ", ".join(f"`{k}`" for k in known)
        hint = hint or (f"did you mean `{similar[0]}`?" if similar else f"use one of {names}")
        super().__init__(f"Unknown {kind} `{name}`: the names are {names}", hint)


class MissingPackageError(UsageError):
    """An optional package that is not installed."""

    def __init__(self, purpose: str, package: str, hint: str):
        super().__init__(f"{purpose} needs the package `{package}`, which is not installed", hint)


class DataError(TfdistError):
    """A dataset that is missing, empty or inconsistent."""


class NonFiniteLossError(TfdistError):
    """The loss became NaN or infinite."""


class VerificationError(TfdistError):
    """The steps of a strategy differ from those of one device by more than rounding errors, or violate its bound.

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
        """Returns the error for processes that were lost after the job had begun."""
        return cls(
            sentence,
            "see the output of that process; start the job again with `--resume`, or your own script with "
            "`Checkpoint(..., resume=True)`",
        )


class DisagreementError(ClusterError):
    """Processes of a job have different settings."""

    exit_code = EXIT_USAGE

    @classmethod
    def among(
        cls, settings_by_rank: Mapping[int, Mapping[str, object]], named: Callable[[Collection[int]], str]
    ) -> DisagreementError | None:
        """Returns the error that shows, for each setting that differs, the values and which processes have them.

        Args:
            settings_by_rank: the settings of each process.
            named: returns the text for a collection of ranks.

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
    """Returns a phrase with the values of all processes, in which processes with equal values are grouped.

    Args:
        values: the value of each process, by rank.
        named: returns the text for a collection of ranks.
        template: the format string for one value, with the fields `ranks`, `have` ("have" or "has") and `value`.
    """
    groups: dict[object, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(value, []).append(rank)
    phrases = [
        template.format(ranks=named(ranks), have="has" if len(ranks) == 1 else "have", value=value)
        for value, ranks in list(groups.items())[:MOST_VALUES]
    ]
    omitted = len(groups) - MOST_VALUES
    return ", ".join(phrases) + (f", and there are {omitted} more values" if omitted > 0 else "")
