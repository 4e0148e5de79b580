"""One finding of the doctor: a sentence about a subject, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfdist import redaction
from tfdist.errors import TfdistError

# A note is something that the user should know, but that keeps no strategy from running.
State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A finding about a subject.

    Attributes:
        subject: such as "memory".
        state: "ok", "note" or "problem".
        sentence: the observation; for a problem, also what is wrong.
        hint: what to do; empty if there is nothing to do.

    Both are without secret values, since the report is pasted into bug reports.
    """

    subject: str
    state: State
    sentence: str
    hint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sentence", redaction.hide_in_sentence(self.sentence))
        object.__setattr__(self, "hint", redaction.hide_in_sentence(self.hint))

    @property
    def is_problem(self) -> bool:
        """Whether the state is "problem"."""
        return self.state == "problem"


def ok(subject: str, sentence: str) -> Finding:
    """A finding that needs no action."""
    return Finding(subject, "ok", sentence)


def note(subject: str, sentence: str, hint: str = "") -> Finding:
    """A finding that the user should know."""
    return Finding(subject, "note", sentence, hint)


def problem(subject: str, sentence: str, hint: str) -> Finding:
    """A finding that keeps a strategy from running."""
    return Finding(subject, "problem", sentence, hint)


def of_error(subject: str, error: TfdistError) -> Finding:
    """The problem that corresponds to an error of tfdist."""
    return problem(subject, error.sentence, error.hint)
