"""What makes the figures of a case doubtful: too few rounds, short epochs, other programs, a processor that slows down.

The conditions are measured with each run, see `tfdist.study.conditions`. Since strategies are compared within rounds, a
doubt does not make a difference wrong; it explains wide intervals, and figures that another day will not repeat.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.study import ratios
from tfdist.study.measure import Measured
from tfdist.study.results import Comparison, Row
from tfdist.terminal import counted

SHORT_EPOCH_SECONDS = 0.5
# Of the cores: a smaller share of other programs, such as a terminal, is usual.
SHARE_OF_OTHERS = 0.1
PRACTICAL_ROUNDS = 50
# The slowest loop as a multiple of the fastest; without other programs and throttling, loops differ by some 3 %.
SLOWDOWN = 1.1


def of(comparison: Comparison) -> list[str]:
    """Returns a sentence for each reason to doubt the figures of a case."""
    measured = [run.measured for row in comparison.rows for run in row.runs if run.measured is not None]
    cores = min((run.cores for run in measured if run.cores is not None), default=1)
    return [
        *_too_few_rounds(comparison),
        *_short_epochs(comparison.rows),
        *_load_before(measured, cores),
        *_other_programs(measured, cores),
        *_slow_processor(measured),
    ]


def _too_few_rounds(comparison: Comparison) -> Iterator[str]:
    leader = comparison.leader
    pairs = [(row, comparison.base, row.speed) for row in comparison.rows]
    pairs += [(row, leader, comparison.leads.get(row.cell)) for row in comparison.rows if leader is not None]
    open_pairs = [(row, other, ratio) for row, other, ratio in pairs if ratio is not None and not ratio.is_settled]
    if not open_pairs:
        return
    names = ", ".join(f"`{row.cell.name}` and `{other.cell.name}`" for row, other, _ in open_pairs)
    measured = max(ratio.rounds for *_, ratio in open_pairs)
    if reason := next((ratio.reason for *_, ratio in open_pairs if ratio.reason), ""):
        yield f"No interval and no difference can be stated for {names}, because {_CAUSES[reason]}."
        return
    needed = max(measured + 1, *(ratio.rounds_needed or ratios.MOST_ROUNDS + 1 for *_, ratio in open_pairs))
    expected = f"more than {ratios.MOST_ROUNDS}" if needed > ratios.MOST_ROUNDS else f"about {needed}"
    advice = "use longer epochs, or a quieter machine"
    if needed <= PRACTICAL_ROUNDS:
        advice = "measure again with `--repeats`, in another `--out`"
    yield (
        f"{counted(measured, 'round')} {'is' if measured == 1 else 'are'} too few to decide whether {names} differ by "
        f"more than {ratios.RESOLUTION - 1:.0%}; as the runs vary, {expected} are needed: {advice}."
    )


_CAUSES = {
    ratios.ONE_ROUND: "a ratio was measured only once: measure again with more rounds",
    ratios.ADDED_ROUNDS: "rounds were added after the results were known: measure again in another `--out`",
}


def _short_epochs(rows: list[Row]) -> Iterator[str]:
    short = [row for row in rows if row.epoch_seconds is not None and row.epoch_seconds < SHORT_EPOCH_SECONDS]
    if short:
        shortest = min(row.epoch_seconds or 0.0 for row in short)
        names = ", ".join(f"`{row.cell.name}`" for row in short)
        yield (
            f"Epochs of {names} are shorter than {SHORT_EPOCH_SECONDS:g} s (the shortest takes {shortest:.2g} s), so "
            "that fixed costs and single pauses count: use a dataset with more examples, or a larger model."
        )


def _load_before(measured: list[Measured], cores: int) -> Iterator[str]:
    loads = [run.load_before for run in measured if run.load_before is not None]
    above = sum(load > cores for load in loads)
    if above:
        yield (
            f"Before {above} of {counted(len(loads), 'run')}, the load of other programs was above the "
            f"{counted(cores, 'core')}: at most {max(loads):.1f} threads that could run."
        )


def _other_programs(measured: list[Measured], cores: int) -> Iterator[str]:
    used = [run.cores_of_others for run in measured if run.cores_of_others is not None]
    above = sum(use > cores * SHARE_OF_OTHERS for use in used)
    if above:
        yield (
            f"During {above} of {counted(len(used), 'run')}, other programs used more than {SHARE_OF_OTHERS:.0%} of "
            f"the {counted(cores, 'core')}: at most {max(used):.2g} cores."
        )


def _slow_processor(measured: list[Measured]) -> Iterator[str]:
    seconds = [value for run in measured for value in run.loop_seconds]
    if seconds and max(seconds) > SLOWDOWN * min(seconds):
        yield (
            f"The processor ran the same loop up to {max(seconds) / min(seconds) - 1:.0%} slower at some times than at "
            "others: its clock is throttled, or other programs share its cores."
        )
