"""The figures of a study: for each case a row for each cell, made from its runs.

Seconds and bytes are medians over the runs that did not fail; times to a target are those of the runs that reached it,
beside how many did.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfdist.profiling import breakdown
from tfdist.study import ratios, work
from tfdist.study.plan import Case, Cell
from tfdist.study.prices import NO_PRICES, Prices
from tfdist.study.runs import Run

SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True)
class Row:
    """A cell.

    Attributes:
        cell: which one.
        runs: all of its runs that are timed, failed ones too.
        traced: its runs with a trace.
        speed: how many times as fast an epoch is as the base's; `None` for the base, and where no round has both.
        marks: what makes it unequal, or that it did not learn.
        prices: of machines; empty if not given.
        strong_efficiency: examples a second over those of one worker (of `single`, if the strategy was not measured
            with one) with the same global batch, divided by the number of workers.
        weak_efficiency: the same, where one worker has a global batch that is smaller by the number of workers.
    """

    cell: Cell
    runs: list[Run]
    traced: list[Run] = field(default_factory=list)
    speed: ratios.Ratio | None = None
    is_base: bool = False
    marks: list[str] = field(default_factory=list)
    prices: Prices = NO_PRICES
    strong_efficiency: float | None = None
    weak_efficiency: float | None = None

    @property
    def good(self) -> list[Run]:
        """The runs that did not fail."""
        return [run for run in self.runs if not run.error]

    def median(self, figure: Callable[[Run], float | None]) -> float | None:
        """Of a figure of the runs that did not fail and have it."""
        return _median(figure(run) for run in self.good)

    @property
    def epoch_seconds(self) -> float | None:
        """Training seconds of an epoch after the first one."""
        return self.median(lambda run: run.epoch_seconds)

    @property
    def examples_per_second(self) -> float | None:
        """Training examples a second in those epochs."""
        return _examples_per_second(self.runs)

    @property
    def warm_up_seconds(self) -> float | None:
        """What the first epoch takes longer."""
        return self.median(lambda run: run.warm_up_seconds)

    @property
    def evaluation_seconds(self) -> float | None:
        """Seconds of evaluation in an epoch."""
        return self.median(lambda run: _median(epoch.evaluation_seconds for epoch in run.later_epochs))

    @property
    def startup_seconds(self) -> float | None:
        """From the command to the first training step."""
        return self.median(lambda run: run.record.startup_seconds if run.record else None)

    @property
    def wall_seconds(self) -> float | None:
        """From the start of the command to its end."""
        return self.median(lambda run: run.measured.wall_seconds if run.measured else None)

    @property
    def cpu_seconds(self) -> float | None:
        """Processor time of all processes."""
        return self.median(lambda run: run.measured.cpu_seconds if run.measured else None)

    @property
    def gpus_busy(self) -> float | None:
        """GPUs of the measuring machine that compute at a time."""
        return self.median(lambda run: run.measured.gpus_busy if run.measured else None)

    @property
    def gpu_memory_in_use_bytes(self) -> float | None:
        """The most that was in use on one GPU of the measuring machine, by all processes."""
        return self.median(lambda run: run.measured.gpu_memory_bytes if run.measured else None)

    @property
    def network_bytes_a_step(self) -> float | None:
        """Bytes that the processes of the job send in a step."""
        return self.median(_network_bytes_a_step)

    @property
    def step_seconds(self) -> float | None:
        """Of a step in those epochs."""
        return self.median(lambda run: _median(epoch.step_seconds for epoch in run.later_epochs))

    @property
    def traced_step(self) -> breakdown.Breakdown | None:
        """What a step is spent on, of the last run with a trace; `None` without one."""
        found = [run.record.breakdown for run in [*self.runs, *self.traced] if run.record and run.record.breakdown]
        return breakdown.Breakdown(**found[-1].model_dump()) if found else None

    @property
    def breakdown(self) -> dict[str, float]:
        """The parts of a traced step by what they are spent on, 0 to 1; empty without a trace."""
        return {} if self.traced_step is None else self.traced_step.shares()

    @property
    def peak_memory_bytes(self) -> list[float]:
        """The largest resident set of each training process, by rank."""
        of_runs = [[process.peak_memory_bytes for process in run.record.processes] for run in self.good if run.record]
        columns = zip(*of_runs, strict=False)
        return [found for column in columns if (found := _median(column)) is not None]

    @property
    def peak_gpu_memory_bytes(self) -> float | None:
        """The largest allocation on a GPU."""
        return self.median(lambda run: run.record.peak_gpu_memory_bytes if run.record else None)

    @property
    def loss(self) -> float | None:
        """The training loss of the last epoch."""
        return self.median(lambda run: run.last("loss"))

    @property
    def accuracy(self) -> float | None:
        """The validation accuracy of the last epoch, 0 to 1."""
        return self.median(lambda run: run.last("val_accuracy"))

    @property
    def staleness(self) -> float | None:
        """The mean number of updates between a step's read and its own, of parameter servers."""
        return self.median(lambda run: run.last("staleness_mean"))

    @property
    def reached(self) -> str:
        """Such as `4 of 5`; "" without a target."""
        of_target = [run.reached for run in self.runs if run.error or run.reached is not None]
        known = any(run.reached is not None for run in self.runs)
        return f"{sum(reached is True for reached in of_target)} of {len(of_target)}" if known else ""

    @property
    def seconds_to_target(self) -> float | None:
        """Wall time from the first touch of data to the target, of the runs that reached it."""
        return self.median(lambda run: run.seconds_to_target)

    @property
    def training_seconds_to_target(self) -> float | None:
        """Training time alone, of the runs that reached it."""
        return self.median(
            lambda run: run.record.time_to_target.seconds if run.record and run.record.time_to_target else None
        )

    @property
    def epochs_to_target(self) -> float | None:
        """Epochs, of the runs that reached it."""
        return self.median(lambda run: run.epochs_to_target)

    @property
    def price(self) -> float | None:
        """Of the machine until the target is reached; of a whole run where there is no target."""
        return self.median(self._price)

    def _price(self, run: Run) -> float | None:
        whole = None if run.measured is None else run.measured.wall_seconds
        seconds = run.seconds_to_target if self.reached else whole
        an_hour = None if run.record is None else self.prices.an_hour(run.record.machine)
        return None if seconds is None or an_hour is None else seconds / SECONDS_AN_HOUR * an_hour


@dataclass(frozen=True)
class Comparison:
    """A case: its rows, in the order of the study."""

    case: Case
    rows: list[Row]

    @property
    def base(self) -> Row:
        """The row that the others are compared with."""
        return next(row for row in self.rows if row.is_base)

    @property
    def fastest(self) -> Row | None:
        """The row with the shortest epoch among those without a mark; `None` if no row has one."""
        found = [row for row in self.rows if row.epoch_seconds is not None and not row.marks]
        return min(found, key=lambda row: row.epoch_seconds or 0.0) if found else None


def of_runs(runs: Sequence[Run], prices: Prices = NO_PRICES) -> list[Comparison]:
    """The comparisons that runs make: one for each case, each with a row for each cell.

    Args:
        runs: in any order.
        prices: of machines.
    """
    by_cell: dict[Cell, list[Run]] = {}
    traced: dict[Cell, list[Run]] = {}
    for run in runs:
        (traced if run.traced else by_cell).setdefault(run.cell, []).append(run)
    cases = list(dict.fromkeys(cell.case for cell in by_cell))
    found = []
    for case in cases:
        cells = sorted((cell for cell in by_cell if cell.case == case), key=_order)
        found.append(Comparison(case, _rows(cells, by_cell, traced, prices)))
    return found


def _order(cell: Cell) -> tuple[bool, int]:
    """`single` comes first, then the others as they were begun, by the number of workers."""
    return cell.strategy != "single", cell.workers


def _rows(
    cells: Sequence[Cell], by_cell: Mapping[Cell, list[Run]], traced: Mapping[Cell, list[Run]], prices: Prices
) -> list[Row]:
    base = next((cell for cell in cells if any(not run.error for run in by_cell[cell])), cells[0])
    return [
        Row(
            cell=cell,
            runs=by_cell[cell],
            traced=traced.get(cell, []),
            speed=None if cell == base else speed(by_cell[base], by_cell[cell]),
            is_base=cell == base,
            marks=work.marks(by_cell[cell], by_cell[base]),
            prices=prices,
            strong_efficiency=_efficiency(cell, by_cell, weak=False),
            weak_efficiency=_efficiency(cell, by_cell, weak=True),
        )
        for cell in cells
    ]


def speed(base: Sequence[Run], other: Sequence[Run]) -> ratios.Ratio | None:
    """How many times as fast an epoch of `other` is, within rounds."""
    return ratios.of_rounds(_seconds_by_round(base), _seconds_by_round(other))


def _seconds_by_round(runs: Sequence[Run]) -> dict[object, float]:
    return {run.occasion: run.epoch_seconds for run in runs if not run.error and run.epoch_seconds}


def _efficiency(cell: Cell, by_cell: Mapping[Cell, list[Run]], weak: bool) -> float | None:
    """Examples a second beside those of one worker of the same strategy, divided by the number of workers."""
    size = cell.case.batch_size
    if cell.workers == 1 or (weak and size % cell.workers):
        return None
    case = replace(cell.case, batch_size=size // cell.workers if weak else size)
    alone = by_cell.get(Cell(case, cell.strategy, 1, cell.label)) or by_cell.get(Cell(case, "single", 1, "single"), [])
    rate, of_one = _examples_per_second(by_cell[cell]), _examples_per_second(alone)
    return None if rate is None or not of_one else rate / of_one / cell.workers


def _examples_per_second(runs: Iterable[Run]) -> float | None:
    return _median(_median(epoch.examples_per_second for epoch in run.later_epochs) for run in runs if not run.error)


def _network_bytes_a_step(run: Run) -> float | None:
    found = [
        epoch.network_bytes * epoch.step_seconds / epoch.train_seconds
        for epoch in run.later_epochs
        if epoch.network_bytes is not None and epoch.step_seconds and epoch.train_seconds
    ]
    return _median(found)


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
