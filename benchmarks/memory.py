"""Peak resident memory of a whole process that trains `mlp` for two epochs on the same 60,000 float32 examples.

Example: `python -m benchmarks.memory --repeats 3`
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks import race

CONTESTANTS = {
    "custom": "benchmarks.contestants:custom",
    "single": "benchmarks.contestants:single",
    "fit": "benchmarks.contestants:fit",
}
PEER = "fit"
TARGET = 1.1


def measure(contestants: Mapping[str, str], job: race.Job, repeats: int) -> dict[str, list[float]]:
    """Peaks in MiB, by contestant: one process each, which does nothing else, in turn."""
    peaks: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, function in contestants.items():
            track = race.run(job, {name: function}, warmup=1, repeats=1)[name]
            peaks[name].append(track.peak_mib)
    return peaks


def report(peaks: Mapping[str, list[float]]) -> None:
    """Prints the table."""
    print("\nmlp, batch 32: peak resident memory of the process, MiB\n")
    print(f"{'contestant':<16}{'median':>9}{'min':>9}{'max':>9}{'/ ' + PEER:>9}   at most {TARGET}")
    for name, found in peaks.items():
        median = statistics.median(found)
        line = f"{name:<16}{median:>9.0f}{min(found):>9.0f}{max(found):>9.0f}"
        if PEER in peaks and name != PEER:
            ratio = median / statistics.median(peaks[PEER])
            line += f"{ratio:>9.2f}   {race.verdict(ratio <= TARGET)}"
        print(line)


def main() -> None:
    arguments = race.parser(__doc__, repeats=3).parse_args()
    contestants = race.chosen(CONTESTANTS, arguments.only)
    with race.examples(arguments.data_dir) as (folder, _):
        job = race.Job("mlp", batch_size=32, examples=60_000, epochs=0, data=folder)
        report(measure(contestants, job, arguments.repeats))


if __name__ == "__main__":
    main()
