"""Seconds per epoch on two logical CPU devices: stock fit under MirroredStrategy, compared with tfdist.

An epoch is a part of Fashion-MNIST, because stock fit is slow here: 9,600 examples for `mlp`, 12,800 for `cnn`.
Example: `python -m benchmarks.mirrored_two --models mlp`
"""

from __future__ import annotations

from benchmarks import race
from benchmarks.race import Goal, Job

CONTESTANTS = {
    "mirrored": "benchmarks.contestants:mirrored",
    "custom_devices": "benchmarks.contestants:custom_devices",
    "mirrored_fit": "benchmarks.contestants:mirrored_fit",
    "mirrored_fit_tuned": "benchmarks.contestants:mirrored_fit_tuned",
}
BATCH_SIZE = {"mlp": 32, "cnn": 128}
EXAMPLES = {"mlp": 9_600, "cnn": 12_800}
TARGET = {"mlp": 2.5, "cnn": 1.3}


def main() -> None:
    parser = race.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZE, default=list(BATCH_SIZE))
    arguments = parser.parse_args()
    contestants = race.chosen(CONTESTANTS, arguments.only)
    with race.examples(arguments.data_dir) as (folder, _):
        for model in arguments.models:
            job = Job(model, BATCH_SIZE[model], EXAMPLES[model], epochs=0, data=folder, devices=2)
            tracks = race.run(job, contestants, warmup=arguments.warmup, repeats=arguments.repeats)
            goals = [
                Goal("mirrored_fit", "mirrored", TARGET[model]),
                Goal("mirrored_fit", "custom_devices"),
                Goal("mirrored_fit_tuned", "mirrored"),
                Goal("mirrored_fit_tuned", "custom_devices"),
            ]
            title = f"{model}, batch {job.batch_size}, {job.examples:,} examples, two devices: seconds per epoch"
            race.report(title, tracks, goals)


if __name__ == "__main__":
    main()
