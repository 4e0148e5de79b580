"""What bounds the training of a cell (input, compute, communication or latency), from runs that differ only in input.

    real         the dataset as it is
    cached       its examples in memory       faster by the cost of reading and decoding
    synthetic    the same batch in memory     faster by the cost of all input
                 for every step

The speed ratios come from epochs of the same round, with an interval; if the interval includes 1, no cost of input was
found.
In the remaining time, a trace of steps with synthetic input separates compute from communication; the rest is waiting,
that is, latency. The largest part bounds the training, as in `tfdist.profiling.breakdown`.

Synopsis:

    >>> parts = {"compute": 0.9, "communication": 0.0, "waiting": 0.1}
    >>> verdict = Verdict(None, ratios.Ratio(2.5, 2.4, 2.6, rounds=5), None, parts)
    >>> {kind: round(share, 2) for kind, share in verdict.shares.items()}
    {'compute': 0.36, 'communication': 0.0, 'input': 0.6, 'waiting': 0.04}
    >>> verdict.bound
    'input'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfdist.profiling import breakdown
from tfdist.study import ratios, results, work
from tfdist.study.plan import REAL, SYNTHETIC, Case, Cell
from tfdist.study.results import Comparison, Row

CACHED = "cached"


@dataclass(frozen=True)
class Verdict:
    """What bounds the training of a cell.

    Attributes:
        cell: the cell with real input.
        synthetic: how many times as fast an epoch is with synthetic input.
        cached: how many times as fast it is with cached input; `None` if this was not measured.
        parts: the shares of "compute", "communication" and "waiting" in a step with synthetic input, 0 to 1; empty
            without a trace.
        unequal: further differences of the runs with synthetic input, as short phrases; with any, the times show
            nothing.
    """

    cell: Cell
    synthetic: ratios.Ratio
    cached: ratios.Ratio | None
    parts: Mapping[str, float]
    unequal: list[str] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether the runs show the cost of input."""
        return self.synthetic.low is not None and not self.unequal

    @property
    def is_settled(self) -> bool:
        """Whether more rounds are not needed, see `tfdist.study.looks`."""
        return self.synthetic.is_settled and (self.cached is None or self.cached.is_settled)

    @property
    def input_share(self) -> float:
        """The share of input in an epoch, 0 to 1."""
        return _saved_share(self.synthetic)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind of `tfdist.profiling.breakdown` in an epoch; empty if the runs do not show them."""
        if not self.is_known or not self.parts:
            return {}
        shares = {kind: (1 - self.input_share) * share for kind, share in self.parts.items()}
        return {kind: shares.get(kind, self.input_share) for kind in breakdown.FIRST_TO_TRY}

    @property
    def bound(self) -> str:
        """The kind with the largest share; "" if the runs do not show it."""
        if self.shares:
            return breakdown.bound_of(self.shares)
        return "input" if self.is_known and self.input_share > 0.5 else ""  # without the other shares

    @property
    def advice(self) -> str:
        """Sentences on what bounds the training, and what to do about it."""
        if self.unequal:
            return f"Nothing follows, because synthetic input changes the work: {'; '.join(self.unequal)}."
        if not self.is_known:
            return f"The cost of input is unknown: {self.synthetic.reason}. Measure again, with more rounds."
        if self.bound:
            text = breakdown.advice(self.shares or {self.bound: self.input_share}).replace("\n", " ")
        else:
            text = (
                f"Input takes {self.input_share:.0%} of an epoch; without a trace, it is unknown whether the rest is "
                "compute, communication or latency."
            )
        text += f" With synthetic input an epoch is {_times_as_fast(self.synthetic)}."
        if self.cached is None or not self.input_share:
            return text
        text += f" With examples in memory it is {_times_as_fast(self.cached)}"
        return f"{text}." if _saved_share(self.cached) else f"{text}: augmentation and batch transfer take the time."


def of(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Returns a verdict for each cell that was measured with real and with synthetic input."""
    by_case: dict[Case, dict[Cell, dict[str, Row]]] = {}
    for row in (row for comparison in comparisons for row in comparison.rows):
        cell = replace(row.cell, case=row.cell.case.with_real_input)
        by_case.setdefault(cell.case, {}).setdefault(cell, {})[row.cell.case.input] = row
    return [verdict for cells in by_case.values() for verdict in _of_case(cells)]


def _of_case(cells: Mapping[Cell, Mapping[str, Row]]) -> list[Verdict]:
    """The verdicts of a case, whose ratios are a table."""
    pairs = {
        (cell, name): (rows[REAL].runs, rows[name].runs)
        for cell, rows in cells.items()
        for name in (SYNTHETIC, CACHED)
        if {REAL, SYNTHETIC, name} <= set(rows)
    }
    speed = dict(zip(pairs, results.speeds(list(pairs.values())), strict=True))
    verdicts = []
    for cell, rows in cells.items():
        synthetic = speed.get((cell, SYNTHETIC))
        if synthetic is not None:
            unequal = _unequal(rows[REAL], rows[SYNTHETIC])
            verdicts.append(Verdict(cell, synthetic, speed.get((cell, CACHED)), _parts(rows[SYNTHETIC]), unequal))
    return verdicts


def _parts(row: Row) -> dict[str, float]:
    """The shares of compute and communication, measured by a trace, and of waiting, in a step without a trace.

    Tracing mostly lengthens the time between operations, so waiting is what remains of an untraced step.
    """
    traced, step_seconds = row.traced_step, row.step_seconds
    if traced is None or not step_seconds:
        return {}
    compute, communication = traced.compute_seconds, traced.communication_seconds
    total = max(step_seconds, compute + communication)
    parts = {"compute": compute / total, "communication": communication / total}
    return parts | {"waiting": 1 - sum(parts.values())}


def _unequal(real: Row, synthetic: Row) -> list[str]:
    real_runs = {run.occasion: run for run in real.good}
    pairs = [(run, real_runs[run.occasion]) for run in synthetic.good if run.occasion in real_runs]
    return list(dict.fromkeys(phrase for pair in pairs for phrase in work.unequal(*pair)))


def _saved_share(ratio: ratios.Ratio) -> float:
    """The share of the time that is saved, 0 to 1; 0 if the interval includes 1."""
    return max(0.0, 1 - 1 / ratio.estimate) if ratio.is_difference else 0.0


def _times_as_fast(ratio: ratios.Ratio) -> str:
    return f"{ratio.text} times as fast" if ratio.is_difference else f"as fast: {ratio.text}"
