"""Does TensorFlow see the GPUs of this machine, and can they exchange tensors by NCCL?"""

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
    """What was found out about GPUs."""
    present, silent = by_driver()
    return [*silent, *of_tensorflow(engines.loaded("tensorflow"), present), *(nccl() if len(present) > 1 else [])]


def by_driver() -> tuple[list[str], list[Finding]]:
    """The GPUs that NVIDIA's driver lists, such as `GPU 0: NVIDIA H100 80GB HBM3`, and the problem if it fails."""
    if shutil.which("nvidia-smi") is None:
        return [], []
    ended = child.run(["nvidia-smi", "-L"], SECONDS_TO_ANSWER)
    if not ended.is_well:
        said = f": {ended.last_line()}" if ended.last_line() else ""
        return [], [problem(SUBJECT, f"`nvidia-smi` {ended.how()}{said}", "install, or load, NVIDIA's driver")]
    lines = [line.strip() for line in ended.out.splitlines()]
    return [line.partition(" (UUID")[0] for line in lines if line.startswith("GPU ")], []


def of_tensorflow(loaded: engines.Loaded, present: list[str]) -> Iterator[Finding]:
    """Whether TensorFlow, as it was `loaded`, sees the GPUs that are `present` for the driver."""
    if loaded.error:
        return  # which is told already
    seen = loaded.facts["gpus"]
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
            f"{_why(loaded)}",
            f"pip install 'tensorflow[and-cuda]=={installed('tensorflow')}'",
        )
    elif seen:
        yield ok(
            SUBJECT, f"TensorFlow sees {len(seen)}: {', '.join(seen)}; it was built for CUDA {loaded.facts['cuda']}"
        )
    else:
        yield ok(SUBJECT, "This machine has no GPU of NVIDIA's: TensorFlow computes on the CPU")


def _why(loaded: engines.Loaded) -> str:
    if not loaded.facts["built_with_cuda"]:
        return ": it was built without CUDA"
    said = [line for line in loaded.said.splitlines() if "dlopen" in line or "cuda drivers" in line.lower()]
    return f": {said[0].partition('] ')[2] or said[0]}" if said else ""


def nccl() -> Iterator[Finding]:
    """Whether NCCL loads."""
    loaded = engines.loaded("nccl")
    if loaded.error:
        yield problem(
            SUBJECT,
            "NCCL, by which several GPUs exchange tensors, does not load",
            f"pip install 'tensorflow[and-cuda]=={installed('tensorflow')}'",
        )
    else:
        yield ok(SUBJECT, f"NCCL {loaded.facts['version']} loads")
