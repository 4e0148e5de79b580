"""Seconds an epoch in several processes, each pinned to a core of its own, against one core and against peers.

Example: `python -m benchmarks.cluster --models cnn`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.race import Goal, Job

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
    parser = race.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=GOALS, default=list(GOALS))
    arguments = parser.parse_args()
    with race.examples(arguments.data_dir) as (folder, _):
        for model in arguments.models:
            contestants = race.chosen(ASYNCHRONOUS if model == "mlp" else SYNCHRONOUS, arguments.only)
            job = Job(model, BATCH_SIZE[model], EXAMPLES[model], epochs=0, data=folder)
            tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
            title = f"{model}, batch {job.batch_size}, {job.examples:,} examples, a core a process: seconds an epoch"
            race.report(title, tracks, GOALS[model])


if __name__ == "__main__":
    main()
