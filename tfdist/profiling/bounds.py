"""What bounds a step, by the largest part of its time, and what to try first.

Synopsis:

    >>> bound_of({"compute": 0.3, "communication": 0.5, "input": 0.0, "waiting": 0.2})
    'communication'
"""

from __future__ import annotations

from collections.abc import Mapping

FIRST_TO_TRY = {
    "compute": "let more devices share the batch, use `--dtype-policy mixed_bfloat16` where the hardware has it, or a "
    "smaller model; `tfdist profile RUN` lists the layers that take longest",
    "communication": "a larger global batch, which exchanges gradients less often; `--compression bf16`; fewer and "
    "larger processes; a faster link",
    "input": "prepare examples once: `cache` and `prefetch`, parallel `map`, smaller pictures, files on a faster disk",
    "waiting": "a larger batch or fewer replicas: the operations are short beside the time that Python, threads and "
    "other processes take between them; tracing makes that time longer",
}


def bound_of(shares: Mapping[str, float]) -> str:
    """The kind with the largest share, of those in `tfdist.profiling.breakdown`."""
    return max(shares, key=lambda kind: shares[kind])


def advice(shares: Mapping[str, float]) -> str:
    """A sentence on what bounds the step, and one on what to try first."""
    kind = bound_of(shares)
    what = "The step is bound by waiting (latency)" if kind == "waiting" else f"The step is bound by {kind}"
    return f"{what}: {shares[kind]:.0%} of its time.\nTry first: {FIRST_TO_TRY[kind]}."
