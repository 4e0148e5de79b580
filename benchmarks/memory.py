"""Peak resident memory of a process that trains `mlp` for two epochs on the same 60,000 float32 examples.

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


def measure(contestants: Mapping[str, str], job: race.Job, repeats: int) -> dict[str, list[race.Track]]:
    """Runs the contestants one after the other in separate processes, and returns their results."""
    results: dict[str, list[race.Track]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, function in contestants.items():
            results[name].append(race.run(job, {name: function}, warmup=1, repeats=1)[name])
    return results


def report(results: Mapping[str, list[race.Track]]) -> None:
    """Prints the peak, which may occur before the first step, and the memory after the last epoch."""
    print("\nmlp, batch 32: resident memory of the process, MiB\n")
    print(
        f"{'contestant':<14}{'peak':>8}{'min':>8}{'max':>8}{'at the end':>12}{'peak / ' + PEER:>12}   at most {TARGET}"
    )
    for name, tracks in results.items():
        peaks = [track.peak_mib for track in tracks]
        median = statistics.median(peaks)
        at_end = statistics.median(track.resident_mib for track in tracks)
        line = f"{name:<14}{median:>8.0f}{min(peaks):>8.0f}{max(peaks):>8.0f}{at_end:>12.0f}"
        if PEER in results and name != PEER:
            ratio = median / statistics.median(track.peak_mib for track in results[PEER])
            line += f"{ratio:>12.2f}   {race.verdict(ratio <= TARGET)}"
        print(line)


def main() -> None:
    arguments = race.parser(__doc__, repeats=3).parse_args()
    contestants = race.chosen(CONTESTANTS, arguments.only)
    with race.examples(arguments.data_dir) as (folder, _):
        job = race.Job("mlp", batch_size=32, examples=60_000, epochs=0, data=folder)
        report(measure(contestants, job, arguments.repeats))


if __name__ == "__main__":
    main()
