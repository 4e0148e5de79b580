"""`tfdist verify` holds strategies that differ from one device by design to their bounds, on real processes."""

import pytest

from tests.processes.jobs import RunningJob, require_mpi

pytestmark = pytest.mark.thorough

require_mpi()

OWN = """
import keras
from tfdist.strategies import mpi_split
from tfdist.interface.traits import Traits

TRAITS = Traits(processes=True, mpi=True, asynchronous=True, package="mpi4py")

def dense(spec):
    inner = [keras.layers.Flatten(), keras.layers.Dense(16, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input(spec.input_shape), *inner])

class Apart(mpi_split.MpiSplitStrategy):
    "Leaves the averaging out."

    def join(self):
        found = super().join()
        found.sum_in_place = lambda values: None
        return found
"""
RACING = """
from tfdist.strategies import parameter_server
from tfdist.interface.traits import Traits

TRAITS = Traits(processes=True, servers=True, asynchronous=True)

class Racing(parameter_server.ParameterServerStrategy):
    "Does not wait for the steps before."

    def program(self, steps):
        made = super().program(steps)
        made._sequential, made._steps_together = False, None
        return made
"""


def verified(folder, *options):
    """The exit code of a verification on two workers, and what it said in one line."""
    (folder / "own.py").write_text(OWN)
    (folder / "racing.py").write_text(RACING)
    arguments = ("--model", "own:dense", "--dataset", "digits", "--workers", "2", *options)
    with RunningJob("verify", *arguments, module="tfdist", cwd=folder) as job:
        code, out, err = job.end()
    return code, " ".join((out + err).replace("│", " ").split())


SGD = ("--optimizer", "sgd", "--learning-rate", "0.1")


def test_ranks_that_average_every_two_steps_stay_within_the_bound_of_their_distance(tmp_path):
    code, said = verified(tmp_path, "--strategy", "mpi_split", *SGD, "--sync-every", "2")
    assert code == 0, said
    assert "at most r * G * n away" in said and "no limit" not in said
    assert "a rank's distance from the last common weights, 1 step later" in said
    assert "The steps of `mpi_split` stay within its bound." in said


@pytest.mark.exhaustive
def test_averaging_after_each_step_of_sgd_is_held_to_equality(tmp_path):
    code, said = verified(tmp_path, "--strategy", "mpi_split", *SGD, "--momentum", "0.9", "--sync-every", "1")
    assert code == 0, said
    assert "weight sequential/dense/kernel" in said
    assert "on 2 replicas equal those of one device. Its bound is: averaging after each step of SGD" in said


@pytest.mark.parametrize("every", [pytest.param("1", marks=pytest.mark.exhaustive), "2"])
def test_an_averaging_that_is_left_out_breaks_the_bound(tmp_path, every):
    code, said = verified(tmp_path, "--strategy", "own:Apart", *SGD, "--sync-every", every)
    assert code == 1, said
    assert "breaks its bound" in said and "Traceback" not in said


@pytest.mark.parametrize("staleness", ["0", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_steps_on_parameter_servers_stay_within_their_staleness(tmp_path, staleness):
    code, said = verified(tmp_path, "--strategy", "parameter_server", "--ps", "1", "--staleness", staleness)
    assert code == 0, said
    if staleness == "0":
        assert "those of one device. Its bound is: with a staleness of 0, one step runs after the other" in said
    else:
        assert "at most 2 updates of others" in said and "updates that are missing or too many 0 0" in said


def test_steps_that_workers_take_together_are_held_to_equality(tmp_path):
    code, said = verified(tmp_path, "--strategy", "parameter_server", "--ps", "1", "--strategy-option", "mode=bsp")
    assert code == 0, said
    assert "those of one device. Its bound is: the workers take each step together" in said


def test_steps_that_do_not_wait_for_each_other_break_a_staleness_of_0(tmp_path):
    code, said = verified(tmp_path, "--strategy", "racing:Racing", "--ps", "1", "--staleness", "0")
    assert code == 1, said
    assert "breaks its bound (with a staleness of 0, one step runs after the other)" in said
