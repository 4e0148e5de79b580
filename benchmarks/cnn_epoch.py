"""Seconds per epoch: `cnn`, Adam, batch 128, the 60,000 training examples of Fashion-MNIST as float32 in memory.

Example: `python -m benchmarks.cnn_epoch --only single custom fit_tuned`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.race import Goal

CONTESTANTS = {
    "custom": "benchmarks.contestants:custom",
    "single": "benchmarks.contestants:single",
    "fit": "benchmarks.contestants:fit",
    "fit_tuned": "benchmarks.contestants:fit_tuned",
}
GOALS = [
    Goal("fit_tuned", "single", 1.0),
    Goal("fit_tuned", "custom"),
    Goal("fit", "single"),
    Goal("fit", "custom"),
]


def main() -> None:
    parser = race.parser(__doc__, warmup=1)
    parser.add_argument("--examples", type=int, default=60_000, help="training examples (default: %(default)s)")
    arguments = parser.parse_args()
    contestants = race.chosen(CONTESTANTS, arguments.only)
    with race.examples(arguments.data_dir) as (folder, _):
        job = race.Job("cnn", batch_size=128, examples=arguments.examples, epochs=0, data=folder)
        tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
    race.report(f"cnn, batch 128, {job.examples:,} examples: seconds per epoch", tracks, GOALS)


if __name__ == "__main__":
    main()
