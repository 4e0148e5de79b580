"""Seconds per epoch in two processes over MPI, each pinned to its own core, compared with one core and with peers.

Example: `python -m benchmarks.mpi --models cnn`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.cluster import WIDE
from benchmarks.race import Goal

CONTESTANTS = {
    "single_core": "benchmarks.cluster_contestants:single_core",
    "horovod": "benchmarks.mpi_contestants:horovod",
    "raw_horovod": "benchmarks.mpi_contestants:raw_horovod",
    "torch_ddp": "benchmarks.cluster_contestants:torch_ddp",
}
APART = {
    "local_sgd": "benchmarks.mpi_contestants:local_sgd",
    "diloco": "benchmarks.mpi_contestants:diloco",
}
SPLIT = {
    "single_core": CONTESTANTS["single_core"],
    "mpi_split": "benchmarks.mpi_contestants:mpi_split",
    "apart": "benchmarks.mpi_contestants:apart",
}
GOALS = {
    "cnn": [
        Goal("single_core", "horovod", 1.5),
        Goal("raw_horovod", "horovod", 1.2),
        Goal("torch_ddp", "horovod", 1.0),
    ],
    WIDE: [
        Goal("single_core", "horovod", 1.15),
        Goal("raw_horovod", "horovod", 1.5),
        Goal("torch_ddp", "horovod", 1.0),
        Goal("single_core", "local_sgd", 1.5),
        Goal("horovod", "local_sgd", 1.3),
        Goal("horovod", "diloco"),
    ],
    "mlp": [Goal("single_core", "mpi_split", 1.9), Goal("single_core", "apart"), Goal("mpi_split", "apart")],
}
EXAMPLES = {"cnn": 12_800, WIDE: 6_400, "mlp": 48_000}
BATCH_SIZE = {"cnn": 128, WIDE: 128, "mlp": 32}  # over all processes; per process in `mpi_split`


def main() -> None:
    contestants = {"cnn": CONTESTANTS, WIDE: CONTESTANTS | APART, "mlp": SPLIT}
    race.run_models(__doc__, contestants, GOALS, BATCH_SIZE, EXAMPLES)


if __name__ == "__main__":
    main()
