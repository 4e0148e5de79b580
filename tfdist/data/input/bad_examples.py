"""Bad examples: truncated pictures, labels outside the classes, bytes that are not text.

Synopsis:

    >>> bad = BadExamples("skip")
    >>> bad.found("`a.jpg` cannot be decoded")
    >>> bad.sentences
    ['`a.jpg` cannot be decoded']
"""

from __future__ import annotations

from tfdist.errors import DataError, UnknownNameError

FAIL, SKIP = "fail", "skip"
POLICIES = (FAIL, SKIP)


class BadExamples:
    """Leaves out examples that cannot be used, or raises an error.

    Attributes:
        skips: whether bad examples are left out.
        sentences: one sentence per example that was left out, with its path.
    """

    def __init__(self, policy: str):
        """Makes a collector.

        Args:
            policy: "fail" raises an error for the first bad example, "skip" leaves out all of them.

        Raises:
            UnknownNameError: there is no such policy.
        """
        if policy not in POLICIES:
            raise UnknownNameError("policy for bad examples", policy, POLICIES)
        self.skips = policy == SKIP
        self.sentences: list[str] = []

    def found(self, sentence: str, hint: str = "") -> None:
        """Notes a bad example, or raises `DataError` with the sentence."""
        if not self.skips:
            leave_out = "leave such examples out with `--on-bad-example skip`"
            raise DataError(sentence, f"{hint}, or {leave_out}" if hint else f"repair it, or {leave_out}")
        self.sentences.append(sentence)
