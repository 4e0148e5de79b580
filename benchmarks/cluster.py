"""Seconds per epoch in several processes, each pinned to its own core, compared with one core and with peers.

Example: `python -m benchmarks.cluster --models cnn`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.race import Goal

HERE = "benchmarks.cluster_contestants"
SYNCHRONOUS = {
    name: f"{HERE}:{name}"
    for name in ("single_core", "multiworker", "multiworker_bf16", "raw_multiworker", "torch_ddp")
}
ASYNCHRONOUS = {name: f"{HERE}:{name}" for name in ("parameter_server", "coordinator_by_hand")}
WIDE = "benchmarks.wide:build"
GOALS = {
    "cnn": [
        Goal("single_core", "multiworker", 1.5),
        Goal("raw_multiworker", "multiworker", 1.1),
        Goal("torch_ddp", "multiworker", 1.0),
    ],
    WIDE: [
        Goal("single_core", "multiworker", 0.6),
        Goal("single_core", "multiworker_bf16", 0.85),
        Goal("raw_multiworker", "multiworker", 1.25),
        Goal("raw_multiworker", "multiworker_bf16", 1.5),
        Goal("torch_ddp", "multiworker"),
    ],
    "mlp": [Goal("coordinator_by_hand", "parameter_server", 2.0)],
}
EXAMPLES = {"cnn": 12_800, WIDE: 6_400, "mlp": 9_600}
BATCH_SIZE = {"cnn": 128, WIDE: 128, "mlp": 32}


def main() -> None:
    contestants = {model: ASYNCHRONOUS if model == "mlp" else SYNCHRONOUS for model in GOALS}
    race.run_models(__doc__, contestants, GOALS, BATCH_SIZE, EXAMPLES)


if __name__ == "__main__":
    main()
