"""Points 1 to 3, for trainings that nobody chose: what stock Keras on one device ends with, every strategy ends with.

A failure prints the smallest case that fails: it belongs into `test_found.py`, under a name.
"""

import keras
import pytest

from tests.contract import contestants
from tests.fuzz import drawing, running

# Seeds of `drawing.drawn`, and how many cases each stands for.
QUICK = [pytest.param(seed, 2, marks=pytest.mark.slow) for seed in range(2)]
EXHAUSTIVE = [pytest.param(seed, 20, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for seed in range(100, 200)]
# A case is a second or two in one process; processes that exchange each step take longer.
IN_A_JOB = [pytest.param(seed, 30, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for seed in range(300, 305)]


def outcome(case, contestant):
    """What is wrong with `case` under `contestant`; "" if nothing is, or nothing can be said."""
    keras.backend.clear_session(free_memory=False)
    try:
        return running.difference(case, contestant)
    except (running.InvalidError, running.ChaoticError):
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failures(cases, contestant_of):
    """Each failure in `cases`, with the smallest case that has it."""
    found = []
    for index, case in enumerate(cases):
        contestant = contestant_of(index)
        if outcome(case, contestant):
            # The processes of a job must all do the same, so what one of them sees may not lead it.
            smallest = case
            if contestants.WORLD.world_size == 1:
                smallest = running.smallest(case, lambda smaller, who=contestant: bool(outcome(smaller, who)))
            found.append(f"{contestant}, {smallest}: {outcome(smallest, contestant)}")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "count"), QUICK + EXHAUSTIVE)
def test_a_drawn_training_ends_as_on_one_device(seed, count):
    """Each of the strategies of one process in turn."""

    def contestant_of(index):
        return drawing.CONTESTANTS[(seed + index) % len(drawing.CONTESTANTS)]

    assert not failures(drawing.drawn(seed, count), contestant_of)


@pytest.mark.parametrize(("seed", "count"), IN_A_JOB)
def test_a_drawn_training_ends_as_on_one_device_in_a_job(seed, count, request):
    """For the processes of a job alone, which `tests/processes/test_fuzz.py` starts."""
    if contestants.WORLD.world_size == 1:
        pytest.skip("this process is alone")
    ((name, replicas),) = contestants.chosen(request.config)
    assert not failures(drawing.drawn(seed, count), lambda index: (name, replicas))
