"""The contract suite, run by the processes of a job together: each of them passes all of its tests."""

import re
from pathlib import Path

import pytest

from tests.processes.jobs import ROOT, launched

EQUALITY, CALLBACKS, CALL, ORDER, STEPS, USERS_STEPS, BY_HAND, BUILDING, BETWEEN_STEPS = (
    f"tests/contract/test_{name}.py"
    for name in (
        *("equality", "callbacks", "same_call", "order", "steps", "users_steps"),
        *("losses_by_hand", "building", "between_steps"),
    )
)
# What two processes do otherwise than one: parts of unequal length, weighted sums, statistics of all examples, and
# gradients of a step of the user's own. `QUICK` is for a thorough test, `FEW` is among what `make test` runs.
FEW = ["remainder 1", "mask, loss sum", "synchronized batch norm", "own train_step"]
FEW_STEPS = "queue or dropout"
QUICK = [
    "remainder 1",
    "single batch of one example",
    "global clipnorm",
    "gradient accumulation",
    "mixed float16, inf on one replica",
    "mask, loss sum",
    "synchronized batch norm",
    "sparse gradients, adam",
    "own train_step",
]
QUICK_STEPS = "sharpness or pairs or LargestError or drawn"
QUICK_USERS_STEPS = "queue or dropout or condition or numpy or printing"
QUICK_BY_HAND = "CLIP or keeps"
QUICK_BUILDING = "ragged or rehearsal"
QUICK_BETWEEN_STEPS = "super or on_train_begin or count"
QUICK_CALLBACKS = (
    "EarlyStopping or CSVLogger or TerminateOnNaN or all_hooks or backup_and_restore or once_an_epoch"
    " or (not_finite and arrays)"
)


def run_together(strategy, workers, *arguments, cwd, ps=0, options=()):
    """Runs the tests `arguments` in every process of a job, and returns pytest's last line in the chief."""
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--strategies", strategy, *arguments)
    processes = ("--workers", str(workers), "--ps", str(ps), *options)
    done = launched(*processes, "--log-dir", str(cwd / "logs"), *tests, cwd=ROOT, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    return done.stdout.rstrip().splitlines()[-1]  # mpirun may put the line ends of all processes last


def equality_cases(strategy, workers, names):
    """The tests of these cases."""
    return [f"{EQUALITY}::test_equals_stock_keras_on_one_device[{strategy}-{workers}-{name}]" for name in names]


def model_cases(strategy, workers, names):
    """The tests of these models."""
    return [f"{CALL}::test_a_model_gives_what_it_gives_in_stock_keras[{strategy}-{workers}-{name}]" for name in names]


def own_optimizers(strategy, workers):
    """The test of optimizers that `compile` does not know."""
    return f"{CALL}::test_a_model_that_is_never_called_trains_with_optimizers_of_its_own[{strategy}-{workers}-in turn]"


def test_two_workers_end_where_one_device_ends(tmp_path):
    cases = equality_cases("multiworker", 2, FEW)
    last = run_together("multiworker", 2, *cases, USERS_STEPS, "-k", f"test_equality or {FEW_STEPS}", cwd=tmp_path)
    assert f"{len(FEW) + len(FEW_STEPS.split(' or '))} passed" in last


@pytest.mark.thorough
def test_two_workers_keep_the_promises_that_need_most_of_them(tmp_path):
    """Equality, steps of the user's own, callbacks, order, building: one job, since starting it takes a while."""
    models = model_cases("multiworker", 2, ["metric of whole numbers in tests alone"])
    cases = [*equality_cases("multiworker", 2, QUICK), *models, own_optimizers("multiworker", 2)]
    parts = {
        STEPS: QUICK_STEPS,
        USERS_STEPS: QUICK_USERS_STEPS,
        BY_HAND: QUICK_BY_HAND,
        CALLBACKS: QUICK_CALLBACKS,
        ORDER: QUICK_CALLBACKS,
        BUILDING: QUICK_BUILDING,
        BETWEEN_STEPS: QUICK_BETWEEN_STEPS,
    }
    chosen = " or ".join(f"({Path(part).stem} and ({names}))" for part, names in parts.items())
    also = f"test_equality or test_same_call or {chosen}"
    last = run_together("multiworker", 2, *cases, *parts, "-k", also, cwd=tmp_path)
    assert int(re.search(r"(\d+) passed", last)[1]) >= len(cases) + 20, last


@pytest.mark.exhaustive
def test_two_workers_keep_the_states_of_streams_and_leave_out_what_is_ignored(tmp_path):
    zoo = "tests/contract/test_zoo.py"
    assert "3 passed" in run_together("multiworker", 2, zoo, "-m", "not exhaustive", cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("part", [EQUALITY, CALLBACKS, CALL, ORDER, STEPS, USERS_STEPS, BY_HAND])
def test_the_whole_contract(tmp_path, workers, part):
    assert "passed" in run_together("multiworker", workers, part, cwd=tmp_path)
