"""Seconds an epoch in two processes over MPI, each pinned to a core of its own, against one core and against peers.

Example: `python -m benchmarks.mpi --models cnn`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.cluster import WIDE
from benchmarks.race import Goal, Job

CONTESTANTS = {
    "single_core": "benchmarks.cluster_contestants:single_core",
    "horovod": "benchmarks.mpi_contestants:horovod",
    "raw_horovod": "benchmarks.mpi_contestants:raw_horovod",
    "torch_ddp": "benchmarks.cluster_contestants:torch_ddp",
}
SPLIT = {"single_core": CONTESTANTS["single_core"], "mpi_split": "benchmarks.mpi_contestants:mpi_split"}
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
    ],
    "mlp": [Goal("single_core", "mpi_split", 1.9)],
}
EXAMPLES = {"cnn": 12_800, WIDE: 6_400, "mlp": 48_000}
BATCH_SIZE = {"cnn": 128, WIDE: 128, "mlp": 32}  # of all processes; of each in `mpi_split`


def main() -> None:
    parser = race.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=GOALS, default=list(GOALS))
    arguments = parser.parse_args()
    with race.examples(arguments.data_dir) as (folder, _):
        for model in arguments.models:
            contestants = race.chosen(SPLIT if model == "mlp" else CONTESTANTS, arguments.only)
            job = Job(model, BATCH_SIZE[model], EXAMPLES[model], epochs=0, data=folder)
            tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
            title = f"{model}, batch {job.batch_size}, {job.examples:,} examples, a core a process: seconds an epoch"
            race.report(title, tracks, GOALS[model])


if __name__ == "__main__":
    main()
