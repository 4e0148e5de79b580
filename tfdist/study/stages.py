"""The runs of a study, stage by stage: a stage ends with a look at the results, and the next has what is not settled.

Cases that differ only in input end together, because their runs are also compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tfdist.study import measure, results, runs, verdicts
from tfdist.study.measure import Study, Turn
from tfdist.study.plan import Case, Plan


def of(plan: Plan, study: Study, out: Path) -> Iterator[list[Turn]]:
    """Yields the runs of each stage, once the earlier stages are done; the last stage has the traced runs."""
    first, settled = 0, set[Case]()
    turns = measure.turns(plan, study, out)
    for last, _ in study.looks:
        if first:
            settled |= _settled(out, first)
        yield [t for t in turns if first <= t.round < last and t.cell.case.with_real_input not in settled]
        first = last
    yield measure.traced_turns(plan, out)


def _settled(out: Path, rounds: int) -> set[Case]:
    """The cases, with real input, of which all ratios are settled after this number of rounds."""
    comparisons = results.of_runs([run for run in runs.load([out]) if run.round < rounds])
    cases = {comparison.case.with_real_input for comparison in comparisons}
    return cases - {
        *(comparison.case.with_real_input for comparison in comparisons if not comparison.is_settled),
        *(verdict.cell.case for verdict in verdicts.of(comparisons) if not verdict.is_settled),
    }
