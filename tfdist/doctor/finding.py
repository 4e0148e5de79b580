"""One finding of the doctor: a sentence about its subject, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfdist.errors import TfdistError

# A note is what the user should know, and what does not keep any strategy from running.
State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was found out about a subject.

    Attributes:
        subject: such as "memory".
        state: "ok", "note" or "problem".
        sentence: what was found; for a problem, also what is wrong with it.
        hint: what to do; empty if there is nothing to do.
    """

    subject: str
    state: State
    sentence: str
    hint: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether something does not work."""
        return self.state == "problem"


def ok(subject: str, sentence: str) -> Finding:
    """What is as it should be."""
    return Finding(subject, "ok", sentence)


def note(subject: str, sentence: str, hint: str = "") -> Finding:
    """What the user should know."""
    return Finding(subject, "note", sentence, hint)


def problem(subject: str, sentence: str, hint: str) -> Finding:
    """What does not work."""
    return Finding(subject, "problem", sentence, hint)


def of_error(subject: str, error: TfdistError) -> Finding:
    """The problem that an error of tfdist tells."""
    return problem(subject, error.sentence, error.hint)
