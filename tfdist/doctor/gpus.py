"""Checks that TensorFlow sees the GPUs of this machine, and that NCCL loads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from tfdist.doctor import child, engines
from tfdist.doctor.finding import Finding, note, ok, problem
from tfdist.doctor.packages import installed

SUBJECT = "GPUs"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS_TO_ANSWER = 20.0


def findings() -> list[Finding]:
    """The findings about GPUs."""
    present, problems = by_driver()
    result = engines.load("tensorflow")
    return [*problems, *tensorflow_findings(result, present), *(nccl() if len(present) > 1 else [])]


def by_driver() -> tuple[list[str], list[Finding]]:
    """The GPUs that NVIDIA's driver lists, such as `GPU 0: NVIDIA H100 80GB HBM3`, and a problem if it fails."""
    if shutil.which("nvidia-smi") is None:
        return [], []
    result = child.run(["nvidia-smi", "-L"], SECONDS_TO_ANSWER)
    if not result.succeeded:
        detail = f": {result.last_line()}" if result.last_line() else ""
        sentence = f"`nvidia-smi` {result.description()}{detail}"
        return [], [problem(SUBJECT, sentence, "install or load the NVIDIA driver")]
    lines = [line.strip() for line in result.out.splitlines()]
    return [line.partition(" (UUID")[0] for line in lines if line.startswith("GPU ")], []


def tensorflow_findings(result: engines.LoadResult, present: list[str]) -> Iterator[Finding]:
    """Compares the GPUs that TensorFlow sees with those that the driver lists (`present`)."""
    if result.error:
        return  # already reported by `engines`
    seen = result.facts["gpus"]
    hidden = os.environ.get(VISIBLE)
    if len(seen) < len(present) and hidden is not None:
        yield note(
            SUBJECT,
            f"`{VISIBLE}` is `{hidden}`: TensorFlow sees {len(seen)} of the {len(present)} GPUs of this machine",
            f"unset `{VISIBLE}` to use all of them",
        )
    elif len(seen) < len(present):
        yield problem(
            SUBJECT,
            f"TensorFlow sees {len(seen)} of the {len(present)} GPUs of this machine ({', '.join(present)})"
            f"{_why(result)}",
            f"pip install 'tensorflow[and-cuda]=={installed('tensorflow')}'",
        )
    elif seen:
        yield ok(
            SUBJECT, f"TensorFlow sees {len(seen)}: {', '.join(seen)}; it was built for CUDA {result.facts['cuda']}"
        )
    else:
        yield ok(SUBJECT, "This machine has no NVIDIA GPU: TensorFlow computes on the CPU")


def _why(result: engines.LoadResult) -> str:
    """Why TensorFlow sees fewer GPUs, as the end of a sentence; empty if unknown."""
    if not result.facts["built_with_cuda"]:
        return ": it was built without CUDA"
    messages = [line for line in result.stderr.splitlines() if "dlopen" in line or "cuda drivers" in line.lower()]
    return f": {messages[0].partition('] ')[2] or messages[0]}" if messages else ""


def nccl() -> Iterator[Finding]:
    """Checks that NCCL loads."""
    result = engines.load("nccl")
    if result.error:
        yield problem(
            SUBJECT,
            "NCCL, which GPUs use to exchange tensors, does not load",
            f"pip install 'tensorflow[and-cuda]=={installed('tensorflow')}'",
        )
    else:
        yield ok(SUBJECT, f"NCCL {result.facts['version']} loads")
