"""What bounds the training of a cell: input, compute, communication or latency, by runs that differ in input alone.

    real         the dataset as it is
    cached       its examples in memory       as much faster as reading and decoding cost
    synthetic    one batch in memory, again   as much faster as all of input costs
                 and again

How much faster follows from the epochs of a round, with an interval; if that holds 1, input costs nothing. Of the time
that is left, a trace of steps with synthetic input tells what computes and what is exchanged; the rest is waiting, or
latency. The largest part is what bounds the training, as in `tfdist.profiling.breakdown`.

Synopsis:

    >>> parts = {"compute": 0.9, "communication": 0.0, "waiting": 0.1}
    >>> one = Verdict(None, ratios.Ratio(2.5, 2.4, 2.6, rounds=5), None, parts)
    >>> {kind: round(share, 2) for kind, share in one.shares.items()}
    {'compute': 0.36, 'communication': 0.0, 'input': 0.6, 'waiting': 0.04}
    >>> one.bound
    'input'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfdist.profiling import breakdown
from tfdist.study import ratios, results, work
from tfdist.study.plan import REAL, SYNTHETIC, Cell
from tfdist.study.results import Comparison, Row

CACHED = "cached"


@dataclass(frozen=True)
class Verdict:
    """What bounds the training of a cell.

    Attributes:
        cell: with real input.
        synthetic: how many times as fast an epoch is with synthetic input.
        cached: the same with cached input; `None` if it was not measured.
        parts: of a step with synthetic input, 0 to 1: "compute", "communication" and "waiting"; empty if no
            trace tells them.
        unequal: what else is different with synthetic input, as short phrases; nothing follows from the times then.
    """

    cell: Cell
    synthetic: ratios.Ratio
    cached: ratios.Ratio | None
    parts: Mapping[str, float]
    unequal: list[str] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether the runs tell what input costs."""
        return self.synthetic.low is not None and not self.unequal

    @property
    def input_share(self) -> float:
        """The part of an epoch that input costs, 0 to 1."""
        return _saved(self.synthetic)

    @property
    def shares(self) -> dict[str, float]:
        """The parts of an epoch, by the kinds of `tfdist.profiling.breakdown`; empty if the runs do not tell them."""
        if not self.is_known or not self.parts:
            return {}
        found = {kind: (1 - self.input_share) * share for kind, share in self.parts.items()}
        return {kind: found.get(kind, self.input_share) for kind in breakdown.FIRST_TO_TRY}

    @property
    def bound(self) -> str:
        """The kind of the largest part; "" if the runs do not tell."""
        if self.shares:
            return breakdown.bound_of(self.shares)
        return "input" if self.is_known and self.input_share > 0.5 else ""  # whatever the rest is

    @property
    def advice(self) -> str:
        """What bounds the training and what to do about it, as sentences."""
        if self.unequal:
            return f"Nothing follows, because the work is not that with synthetic input: {'; '.join(self.unequal)}."
        if not self.is_known:
            return "One round does not tell what input costs. Measure more of them with `--repeats`."
        told = f"{self._of_bound} With synthetic input an epoch is {_times(self.synthetic)}."
        if self.cached is None or not self.input_share:
            return told
        found = f"{told} With examples held in memory it is {_times(self.cached)}"
        return f"{found}." if _saved(self.cached) else f"{found}: augmenting and handing over batches takes the time."

    @property
    def _of_bound(self) -> str:
        if self.bound:
            return breakdown.advice(self.shares or {self.bound: self.input_share}).replace("\n", " ")
        return (
            f"Input takes {self.input_share:.0%} of an epoch, and no trace tells whether the rest is compute, "
            "communication or latency."
        )


def of(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """The verdicts on the cells that were measured with real and with synthetic input."""
    by_cell: dict[Cell, dict[str, Row]] = {}
    for row in (row for one in comparisons for row in one.rows):
        cell = replace(row.cell, case=replace(row.cell.case, input=REAL))
        by_cell.setdefault(cell, {})[row.cell.case.input] = row
    found = [_verdict(cell, rows) for cell, rows in by_cell.items() if {REAL, SYNTHETIC} <= set(rows)]
    return [one for one in found if one is not None]


def _verdict(cell: Cell, rows: Mapping[str, Row]) -> Verdict | None:
    real, synthetic = rows[REAL], rows[SYNTHETIC]
    speed = results.speed(real.runs, synthetic.runs)
    if speed is None:
        return None
    cached = results.speed(real.runs, rows[CACHED].runs) if CACHED in rows else None
    return Verdict(cell, speed, cached, _parts(synthetic), _unequal(real, synthetic))


def _parts(row: Row) -> dict[str, float]:
    """The parts of a step, 0 to 1: what a trace says is computed and exchanged; the rest of it waits.

    A trace lengthens the time between operations most of all, so that the rest is that of a step that is not traced.
    """
    traced, step_seconds = row.traced_step, row.step_seconds
    if traced is None or not step_seconds:
        return {}
    compute, communication = traced.compute_seconds, traced.communication_seconds
    whole = max(step_seconds, compute + communication)
    parts = {"compute": compute / whole, "communication": communication / whole}
    return parts | {"waiting": 1 - sum(parts.values())}


def _unequal(real: Row, synthetic: Row) -> list[str]:
    of_round = {run.occasion: run for run in real.good}
    pairs = [(run, of_round[run.occasion]) for run in synthetic.good if run.occasion in of_round]
    return list(dict.fromkeys(phrase for pair in pairs for phrase in work.unequal(*pair)))


def _saved(ratio: ratios.Ratio) -> float:
    """The part of the time that is saved, 0 to 1, where the interval leaves out 1."""
    return max(0.0, 1 - 1 / ratio.median) if ratio.is_difference else 0.0


def _times(ratio: ratios.Ratio) -> str:
    return f"{ratio.text} times as fast" if ratio.is_difference else f"as fast: {ratio.text}"
