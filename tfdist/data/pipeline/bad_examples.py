"""Bad examples: a truncated picture, a label outside the classes, bytes that are no text.

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
    """What to do with an example that cannot be used.

    Attributes:
        skips: whether it is left out.
        sentences: one for each that was left out, with its path.
    """

    def __init__(self, policy: str):
        """Makes a collector.

        Args:
            policy: "fail" ends with the first bad example, "skip" leaves all of them out.

        Raises:
            UnknownNameError: another policy.
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
