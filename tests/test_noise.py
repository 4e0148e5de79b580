"""Simulated studies: how often `compare` names a difference that is none, and how often it finds one that is there.

The times are those of a fair measurement on a machine that is not: log-normal noise, a speed that drifts within and
between rounds, and pauses. The order of the runs, the looks at the results and the statements are those of `compare`.
"""

from pathlib import Path

import numpy as np

from tfdist.run import schema
from tfdist.run.schema import EpochRecord
from tfdist.study import looks, measure, plan, results, runs, summary

NAMES = tuple("ABCDEFGH")
STUDIES = 400


def quiet(random, when):
    """Nothing but the noise of each run."""
    return 1.0


def drifting(random, when):
    """A machine that becomes 2 % slower with each run, as one that warms up does."""
    return 1.02**when


def waves(random, when):
    """Other work that comes and goes, with a period of 16 runs."""
    return 1.2 if when % 16 < 8 else 1.0


def pauses(random, when):
    """One run in ten takes up to three times as long."""
    return random.uniform(1.2, 3.0) if random.random() < 0.1 else 1.0


def busy_days(random, when):
    """Noise that differs from round to round by a factor of ten."""
    return float(np.exp(random.normal(0, 0.3) * (random.random() < 0.3)))


MACHINES = (quiet, drifting, waves, pauses, busy_days)


def study(random, contestants, machine, noise=0.03, times_as_fast=None):
    """Simulates a study to its end, and returns its comparison."""
    labels = NAMES[:contestants]
    names = tuple(plan.Contestant("single", label=label) for label in labels)
    study_plan = plan.Plan(("mlp",), ("digits",), names)
    begun = measure.Study(str(random.random()), looks.planned(None, 1))
    made, first = [], 0
    turns = measure.turns(study_plan, begun, Path())
    for last, _ in begun.looks:
        for when, turn in enumerate(turns):
            if first <= turn.round < last:
                faster = (times_as_fast or {}).get(turn.cell.label, 1.0)
                seconds = float(np.exp(random.normal(0, noise))) * machine(random, when) / faster
                made.append(simulated_run(turn, seconds, begun.looks))
        (comparison,) = results.of_runs(made)
        if comparison.is_settled:
            break
        first = last
    return comparison


RECORD = schema.example().model_copy(update={"status": "completed"})


def simulated_run(turn, seconds, study_looks):
    epoch = EpochRecord.from_logs(1, {"loss": 1.0}, seconds)
    record = RECORD.model_copy(update={"epochs": [epoch]})
    position = NAMES.index(turn.cell.label)
    measured = measure.Measured.model_construct(
        round=turn.round, position=position, looks=study_looks, started="", exit_code=0
    )
    return runs.Run(turn.cell, "simulated", turn.round, 0, Path(), record, measured)


def names_a_difference(comparison):
    is_difference = any(row.speed.is_difference for row in comparison.rows if row.speed is not None)
    assert is_difference or (not comparison.faster and "fastest," not in summary.answer(comparison))
    return is_difference


def test_of_400_studies_of_equal_contestants_at_most_5_percent_name_a_difference():
    random = np.random.default_rng(1)
    named = {machine.__name__: 0 for machine in MACHINES}
    for number in range(STUDIES):
        machine = MACHINES[number % len(MACHINES)]
        comparison = study(random, 2 + number % 7, machine)
        named[machine.__name__] += names_a_difference(comparison)
    assert sum(named.values()) <= 0.05 * STUDIES, named


def test_a_strategy_that_is_10_percent_faster_is_named_in_9_of_10_studies_with_3_percent_noise():
    random = np.random.default_rng(2)
    found = [study(random, 2 + number % 7, quiet, times_as_fast={"B": 1.1}) for number in range(200)]
    assert sum(comparison.fastest is not None and comparison.fastest.cell.label == "B" for comparison in found) >= 180
    assert max(len(comparison.base.runs) for comparison in found) <= 8
