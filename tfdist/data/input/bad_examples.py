"""What happens to bad examples, such as truncated pictures, labels outside the classes, or bytes that are not text.

Synopsis:

    >>> bad = BadExamples("skip")
    >>> bad.add("`a.jpg` cannot be decoded")
    >>> bad.sentences
    ['`a.jpg` cannot be decoded']
"""

from __future__ import annotations

from tfdist.errors import DataError, UnknownNameError

POLICIES = ("fail", "skip")


class BadExamples:
    """Leaves out bad examples, or raises an error for the first.

    Args:
        policy: "fail" raises an error for the first bad example, "skip" leaves out all of them.

    Attributes:
        skips: whether bad examples are left out.
        sentences: one sentence per example that was left out, with its path.

    Raises:
        UnknownNameError: there is no such policy.
    """

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise UnknownNameError("policy for bad examples", policy, POLICIES)
        self.skips = policy == "skip"
        self.sentences: list[str] = []

    def add(self, sentence: str, hint: str = "") -> None:
        """Records a bad example, or raises `DataError` with the sentence."""
        if not self.skips:
            leave_out = "leave such examples out with `--on-bad-example skip`"
            raise DataError(sentence, f"{hint}, or {leave_out}" if hint else f"repair it, or {leave_out}")
        self.sentences.append(sentence)
