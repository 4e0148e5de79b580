"""Seconds per epoch: `mlp`, Adam, batch 32, the 60,000 training examples of Fashion-MNIST as float32 in memory.

Example: `python -m benchmarks.mlp_epoch --repeats 7`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.race import Goal

CONTESTANTS = {
    "custom": "benchmarks.contestants:custom",
    "single": "benchmarks.contestants:single",
    "fit": "benchmarks.contestants:fit",
    "fit_tuned": "benchmarks.contestants:fit_tuned",
    "function_loop": "benchmarks.contestants:function_loop",
    "torch_loop": "benchmarks.contestants:torch_loop",
    "torch_loop_all_threads": "benchmarks.contestants:torch_loop_all_threads",
    "fit_tuned_1_thread": "benchmarks.contestants:fit_tuned_1_thread",
    "function_loop_1_thread": "benchmarks.contestants:function_loop_1_thread",
}
GOALS = [
    Goal("fit", "custom", 6.0),
    Goal("fit", "single", 4.0),
    Goal("fit_tuned", "custom", 2.3),
    Goal("function_loop", "custom", 1.6),
    Goal("torch_loop", "custom", 1.3),
    Goal("torch_loop_all_threads", "custom", 1.3),
    Goal("fit_tuned_1_thread", "custom"),
    Goal("function_loop_1_thread", "custom"),
]


def main() -> None:
    parser = race.parser(__doc__)
    parser.add_argument("--examples", type=int, default=60_000, help="training examples (default: %(default)s)")
    arguments = parser.parse_args()
    contestants = race.chosen(CONTESTANTS, arguments.only)
    with race.examples(arguments.data_dir) as (folder, _):
        job = race.Job("mlp", batch_size=32, examples=arguments.examples, epochs=0, data=folder)
        tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
    race.report(f"mlp, batch 32, {job.examples:,} examples: seconds per epoch", tracks, GOALS)


if __name__ == "__main__":
    main()
