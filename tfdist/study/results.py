"""The figures of a study: each case has a row per cell, computed from the cell's runs.

Seconds and bytes are medians over the runs that did not fail. Times to a target are medians over the runs that reached
it; their number is shown next to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tfdist.profiling import breakdown
from tfdist.study import looks, ratios, work
from tfdist.study.plan import Case, Cell
from tfdist.study.prices import NO_PRICES, Prices
from tfdist.study.runs import Run, median

SECONDS_PER_HOUR = 3600.0


class MedianOf:
    """A figure of a row: the median over its runs that did not fail and have the figure."""

    def __init__(self, figure: Callable[[Run], float | None]):
        self._figure = figure

    def __get__(self, row: Row, owner: type[Row]) -> float | None:
        return row.median(self._figure)


def _network_bytes_per_step(run: Run) -> float | None:
    return median(
        epoch.network_bytes * epoch.step_seconds / epoch.train_seconds
        for epoch in run.later_epochs
        if epoch.network_bytes is not None and epoch.step_seconds and epoch.train_seconds
    )


@dataclass(frozen=True)
class Row:
    """The figures of a cell.

    Attributes:
        cell: the cell.
        runs: its timed runs, including failed runs.
        traced: its runs with a trace.
        speed: how many times as fast as the base's an epoch is; `None` for the base, and if no round has both.
        is_base: whether the other rows are compared with this row.
        marks: what makes its work unequal, and why it did not learn.
        prices: prices of machines, which may be empty.
        strong_efficiency: examples per second relative to a single worker (`single` if the strategy was not measured
            with one worker) with the same global batch, divided by the number of workers.
        weak_efficiency: the same relative to a worker whose global batch is smaller by the number of workers.
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
        """Returns the median of a figure over the runs that did not fail and have it."""
        return median(figure(run) for run in self.good)

    # In the epochs after the first:
    epoch_seconds = MedianOf(lambda run: run.epoch_seconds)
    examples_per_second = MedianOf(lambda run: median(epoch.examples_per_second for epoch in run.later_epochs))
    step_seconds = MedianOf(lambda run: median(epoch.step_seconds for epoch in run.later_epochs))
    evaluation_seconds = MedianOf(lambda run: median(epoch.evaluation_seconds for epoch in run.later_epochs))
    # Sent by all processes of the job together.
    network_bytes_per_step = MedianOf(_network_bytes_per_step)
    # The additional time of the first epoch.
    warm_up_seconds = MedianOf(lambda run: run.warm_up_seconds)
    # From the command to the first training step.
    startup_seconds = MedianOf(lambda run: run.record.startup_seconds if run.record else None)
    # From the start of the command to its end; the processor time is that of all processes.
    wall_seconds = MedianOf(lambda run: run.measured.wall_seconds if run.measured else None)
    cpu_seconds = MedianOf(lambda run: run.measured.cpu_seconds if run.measured else None)
    # Of the measuring machine: the mean number of busy GPUs, and the peak memory in use on a GPU, by all processes.
    # Without a GPU that TensorFlow has seen, the driver's numbers are those of other programs.
    gpus_busy = MedianOf(lambda run: run.measured.gpus_busy if run.measured and run.has_gpu else None)
    gpu_memory_in_use_bytes = MedianOf(
        lambda run: run.measured.gpu_memory_bytes if run.measured and run.has_gpu else None
    )
    # The largest allocation on a GPU.
    peak_gpu_memory_bytes = MedianOf(lambda run: run.record.peak_gpu_memory_bytes if run.record else None)
    # The FLOPs of a step on one device, and the share of the machine's peak that the run reached.
    flops_per_step = MedianOf(lambda run: run.utilization.flops_per_step if run.utilization else None)
    mfu = MedianOf(lambda run: run.utilization.mfu if run.utilization else None)
    # After the last epoch: training loss, validation accuracy (0 to 1), and the mean staleness of parameter servers.
    loss = MedianOf(lambda run: run.last("loss"))
    accuracy = MedianOf(lambda run: run.last("val_accuracy"))
    staleness = MedianOf(lambda run: run.last("staleness_mean"))
    # Wall time from the first access to data until the target is reached; training time; epochs.
    seconds_to_target = MedianOf(lambda run: run.seconds_to_target)
    training_seconds_to_target = MedianOf(
        lambda run: run.record.time_to_target.seconds if run.record and run.record.time_to_target else None
    )
    epochs_to_target = MedianOf(lambda run: run.epochs_to_target)

    @property
    def traced_step(self) -> breakdown.Breakdown | None:
        """The parts of a step, from the last run with a trace; `None` without a trace."""
        traces = [run.record.breakdown for run in [*self.runs, *self.traced] if run.record and run.record.breakdown]
        return breakdown.Breakdown(**traces[-1].model_dump()) if traces else None

    @property
    def breakdown(self) -> dict[str, float]:
        """The share of each part of a traced step, 0 to 1; empty without a trace."""
        return {} if self.traced_step is None else self.traced_step.shares()

    @property
    def peak_memory_bytes(self) -> list[float]:
        """The largest resident set of each training process, by rank."""
        by_run = [[process.peak_memory_bytes for process in run.record.processes] for run in self.good if run.record]
        by_rank = zip(*by_run, strict=False)
        return [peak for peaks in by_rank if (peak := median(peaks)) is not None]

    @property
    def reached(self) -> str:
        """How many runs reached the target, such as `4 of 5`; "" without a target."""
        if all(run.reached is None for run in self.runs):
            return ""
        runs = [run for run in self.runs if run.error or run.reached is not None]
        return f"{sum(run.reached is True for run in runs)} of {len(runs)}"

    @property
    def price(self) -> float | None:
        """The price of the machine until the target is reached, or for a run without a target."""
        return self.median(self._price)

    def _price(self, run: Run) -> float | None:
        run_seconds = None if run.measured is None else run.measured.wall_seconds
        seconds = run.seconds_to_target if self.reached else run_seconds
        per_hour = None if run.record is None else self.prices.per_hour(run.record.machine)
        return None if seconds is None or per_hour is None else seconds / SECONDS_PER_HOUR * per_hour


@dataclass(frozen=True)
class Comparison:
    """A case and the rows of its cells, in the order of the study.

    Attributes:
        case: the case.
        rows: the rows.
        leads: how many times as fast as each other row without marks `leader` is, by cell, without the base.
    """

    case: Case
    rows: list[Row]
    leads: Mapping[Cell, ratios.Ratio] = field(default_factory=dict)

    @property
    def base(self) -> Row:
        """The row with which the others are compared."""
        return next(row for row in self.rows if row.is_base)

    @property
    def leader(self) -> Row | None:
        """The row that may be the fastest: see `_leader`."""
        return _leader(self.rows)

    @property
    def faster(self) -> list[Row]:
        """The rows without marks that are faster than the base, from the fastest."""
        return _faster(self.rows)

    @property
    def fastest(self) -> Row | None:
        """The row that is faster than the base and all other rows without marks; `None` if no row is known to be."""
        is_known = all(lead.is_difference and lead.estimate > 1 for lead in self.leads.values())
        return self.leader if is_known and self.faster else None

    @property
    def is_settled(self) -> bool:
        """Whether more rounds are not needed, see `tfdist.study.looks`."""
        speeds = [row.speed for row in self.rows if row.speed is not None]
        return all(ratio.is_settled for ratio in [*speeds, *self.leads.values()])


def _faster(rows: Sequence[Row]) -> list[Row]:
    named = [row for row in rows if not row.marks and row.speed is not None and row.speed.is_difference]
    return sorted((row for row in named if _estimate(row) > 1), key=_estimate, reverse=True)


def _estimate(row: Row) -> float:
    return 1.0 if row.speed is None else row.speed.estimate


def _leader(rows: Sequence[Row]) -> Row | None:
    """The fastest of the rows that are faster than the base, or else of all rows without marks; `None` without any."""
    unmarked = [row for row in rows if row.good and not row.marks and (row.is_base or row.speed is not None)]
    return max(_faster(rows) or unmarked, key=_estimate, default=None)


def of_runs(runs: Sequence[Run], prices: Prices = NO_PRICES) -> list[Comparison]:
    """Returns a comparison for each case of the runs, with a row for each cell.

    Args:
        runs: the runs, in any order.
        prices: prices of machines.
    """
    by_cell: dict[Cell, list[Run]] = {}
    traced: dict[Cell, list[Run]] = {}
    for run in runs:
        (traced if run.traced else by_cell).setdefault(run.cell, []).append(run)
    comparisons = []
    for case in dict.fromkeys(cell.case for cell in by_cell):
        # `single` first, then the others by number of workers, in the order of the plan.
        cells = [cell for cell in by_cell if cell.case == case]
        cells.sort(key=lambda cell: (cell.strategy != "single", cell.workers, by_cell[cell][0].position))
        rows = _rows(cells, by_cell, traced, prices)
        comparisons.append(Comparison(case, rows, _leads(rows)))
    return comparisons


def _rows(
    cells: Sequence[Cell], by_cell: Mapping[Cell, list[Run]], traced: Mapping[Cell, list[Run]], prices: Prices
) -> list[Row]:
    base = next((cell for cell in cells if any(not run.error for run in by_cell[cell])), cells[0])
    others = [cell for cell in cells if cell != base]
    speed = dict(zip(others, speeds([(by_cell[base], by_cell[cell]) for cell in others]), strict=True))
    return [
        Row(
            cell=cell,
            runs=by_cell[cell],
            traced=traced.get(cell, []),
            speed=speed.get(cell),
            is_base=cell == base,
            marks=work.marks(by_cell[cell], by_cell[base]),
            prices=prices,
            strong_efficiency=_efficiency(cell, by_cell, weak=False),
            weak_efficiency=_efficiency(cell, by_cell, weak=True),
        )
        for cell in cells
    ]


def _leads(rows: Sequence[Row]) -> dict[Cell, ratios.Ratio]:
    """See `Comparison`."""
    leader = _leader(rows)
    if leader is None or leader.is_base:
        return {}
    others = [row for row in rows if not (row is leader or row.is_base or row.marks)]
    leads = speeds([(row.runs, leader.runs) for row in others])
    return {row.cell: lead for row, lead in zip(others, leads, strict=True) if lead is not None}


def speeds(pairs: Sequence[tuple[Sequence[Run], Sequence[Run]]]) -> list[ratios.Ratio | None]:
    """Returns how many times as fast as an epoch of the first runs of a pair an epoch of the second runs is.

    Args:
        pairs: the pairs of runs of a table; runs are compared within rounds.
    """
    samples = [ratios.logarithms(_seconds_by_round(base), _seconds_by_round(other)) for base, other in pairs]
    return ratios.of_table(samples, _error([run for pair in pairs for runs in pair for run in runs]))


def _error(runs: Sequence[Run]) -> float | None:
    """The probability of error of a table at the look that its studies have reached; `None` if none is left."""
    error = ratios.ERROR
    for study in {run.study for run in runs}:
        measured = [run.measured for run in runs if run.study == study and run.measured is not None]
        if measured:
            last = max(measured, key=lambda run: run.round)
            error *= looks.share(last.looks, last.round + 1) or 0.0
    return error or None


def _seconds_by_round(runs: Sequence[Run]) -> dict[object, float]:
    return {run.occasion: run.epoch_seconds for run in runs if not run.error and run.epoch_seconds}


def _efficiency(cell: Cell, by_cell: Mapping[Cell, list[Run]], weak: bool) -> float | None:
    """The strong or weak efficiency of a cell, see `Row`."""
    size = cell.case.batch_size
    if cell.workers == 1 or (weak and size % cell.workers):
        return None
    case = replace(cell.case, batch_size=size // cell.workers if weak else size)
    one_worker = by_cell.get(Cell(case, cell.strategy, 1, cell.label))
    one_worker = one_worker or by_cell.get(Cell(case, "single", 1, "single"), [])
    rate, base_rate = _examples_per_second(by_cell[cell]), _examples_per_second(one_worker)
    return None if rate is None or not base_rate else rate / base_rate / cell.workers


def _examples_per_second(runs: Iterable[Run]) -> float | None:
    return median(median(epoch.examples_per_second for epoch in run.later_epochs) for run in runs if not run.error)
