"""`tfdist.horovod` in two real processes, over Gloo and over MPI: what scripts written for Horovod rely on."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.processes import horovod_jobs
from tests.processes.jobs import ROOT, RunningJob, clean_environment

# Equal to one process; the others of `facade_job` have a test of their own.
QUICK = [
    "sgd",
    "adam_and_global_clipnorm",
    "sparse_gradients",
    "loss_scaling_outside",
    "own_step",
    "trained_before_by_one",
]
THOROUGH = ["gradient_accumulation", "steps_per_execution", "several_passes", "mnist_loop"]
# Each process has a different number of examples.
UNEQUAL = ["different_sizes", "different_sizes_normalized", "different_sizes_passes"]
UNEQUAL_THOROUGH = ["different_sizes_sparse", "different_sizes_masked", "different_sizes_sum"]
EXHAUSTIVE = [
    "momentum_and_clipnorm",
    "moving_average",
    "sparse_gradients_as_dense",
    "predivided",
    "run_eagerly",
    "xla_is_left_out",
    "half_precision_on_the_wire",
    "sum_of_gradients",
    "several_passes_added_up",
    "loss_scaling_inside",
    "different_sizes_adam_clipped",
    "different_sizes_scaled",
    "different_sizes_weighted",
]
ONLY_BETWEEN = ["graphs_that_differ"]
ONLY_BETWEEN_THOROUGH = ["built_by_the_first_batch", "checkpoints"]
# What is run together: over Gloo the quick and the thorough cases; over MPI what shows that it is no different.
OVER = {
    "gloo": [
        *QUICK,
        *UNEQUAL,
        "different_sizes_plain_mean",
        *ONLY_BETWEEN,
        "callbacks",
        "values",
        "tapes",
        "collectives",
    ],
    "thorough": [*THOROUGH, *UNEQUAL_THOROUGH, *ONLY_BETWEEN_THOROUGH],
    "mpi": ["sgd", "sparse_gradients", "loss_scaling_outside", "different_sizes", "callbacks", "tapes"],
}
SIZE = 2
pytestmark = horovod_jobs.needs_horovod


@pytest.fixture(scope="module")
def over(tmp_path_factory):
    """The results of each process over an engine; what is asked of it is run once."""
    found = {}

    def results(engine, *names):
        if (engine, names) not in found:
            folder = tmp_path_factory.mktemp(engine)
            output = horovod_jobs.run(engine, "-m", "tests.processes.facade_job", folder, *names)
            ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]
            found[engine, names] = (ranks, folder, output)
        return found[engine, names]

    return results


@pytest.fixture(params=["gloo", pytest.param("mpi", marks=pytest.mark.exhaustive)])
def job(request, over):
    return over(request.param, *OVER[request.param])


def check_equal_to_one_process(results, names):
    for name in names:
        assert results[name]["between"] == 0, name
        assert results[name]["from_one_process"] < (1e-4 if name == "half_precision_on_the_wire" else 5e-6), name


def thorough(names):
    return [pytest.param(name, marks=pytest.mark.thorough) for name in names]


def over_gloo(over, name):
    """The results of the case `name` in each process over Gloo."""
    ranks, _, _ = over("gloo", *OVER["gloo" if name in OVER["gloo"] else "thorough"])
    return ranks


@pytest.mark.parametrize("name", [*QUICK, *thorough(THOROUGH)])
def test_the_weights_are_those_of_one_process_with_the_same_global_batches(over, name):
    check_equal_to_one_process(over_gloo(over, name)[0], [name])


@pytest.mark.parametrize("name", [*UNEQUAL, *thorough(UNEQUAL_THOROUGH)])
def test_batches_of_different_sizes_give_the_weights_of_one_process_with_the_joined_batches(over, name):
    check_equal_to_one_process(over_gloo(over, name)[0], [name])


def test_horovods_own_rule_that_processes_count_alike_can_be_chosen(over):
    (chief, _), _, _ = over("gloo", *OVER["gloo"])
    check_equal_to_one_process(chief, ["different_sizes_plain_mean"])


# What `facade_tapes` finds: the gradient is 1 in process 0 and 2 in process 1, with 3 examples and 1 in "examples".
TAPES = {
    "single": [1.5],
    "list": [[1.5], [1.5]],
    "nested": {"a": [1.5], "b": [[1.5], None]},
    "zero": [[0.0]],
    "output_gradients": [4.5],
    "sparse": [[1.5, 1.5], [0.5, 0.5], [1.0, 1.0]],
    "sparse_as_dense": [[1.5, 1.5], [0.5, 0.5], [1.0, 1.0]],
    "sum": [[3.0]],
    "fp16": [[1.5]],
    "examples": [[1.25], [[1.25, 1.25], [0.75, 0.75], [0.5, 0.5]]],
    "no_sources": [],
    "entered": [[1.5]],
    "watched": [[1.5], None],
    "persistent": [[1.5], [3.0]],
    "in_graph": [[1.5], {"a": [1.5]}, [3.0]],
}


@pytest.mark.parametrize("name", TAPES)
def test_a_tape_gives_the_reduced_gradients_of_variables_of_keras(job, name):
    ranks, _, _ = job
    assert [rank["tapes"][name] for rank in ranks] == [TAPES[name]] * SIZE


def test_the_gradients_of_local_layers_stay_local(job):
    ranks, _, _ = job
    assert [rank["tapes"]["local"] for rank in ranks] == [[[[0.5]], [1.5]], [[[1.0]], [1.5]]]


def test_every_collective_takes_variables_of_keras(over):
    ranks, _, _ = over("gloo", *OVER["gloo"])
    expected = {
        "allreduce": [1.5],
        "allreduce_sum": [3.0],
        "allgather": [1.0, 2.0],
        "broadcast": [2.0],
        "reducescatter": [1.5, 1.5],
        "alltoall": [1.0, 1.0, 2.0, 2.0],
        "grouped_allreduce": [1.5],
        "grouped_allgather": [1.0, 2.0],
        "grouped_reducescatter": [1.5, 1.5],
        "broadcast_variables": [2.0],
        "broadcast_": [2.0],
        "broadcast_object": {"rank": 1},
        "of_all": [1, 1],
        "rate": 0.2,
    }
    assert [rank["collectives"] for rank in ranks] == [expected] * SIZE


@pytest.mark.parametrize("name", [*ONLY_BETWEEN, *thorough(ONLY_BETWEEN_THOROUGH)])
def test_all_processes_have_the_same_weights(over, name):
    assert over_gloo(over, name)[0][name]["between"] == 0


@pytest.mark.exhaustive  # the contract of `horovod` is shown over MPI
def test_over_mpi_the_weights_are_those_of_one_process_too(over):
    (chief, _), _, _ = over("mpi", *OVER["mpi"])
    check_equal_to_one_process(chief, ["sgd", "sparse_gradients", "loss_scaling_outside"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_less_usual_options_give_the_weights_of_one_process(over, name):
    (chief, _), _, _ = over("gloo", *EXHAUSTIVE)
    check_equal_to_one_process(chief, [name])


@pytest.mark.exhaustive
def test_over_mpi_every_case_gives_the_weights_of_one_process(over):
    equal, between = [*QUICK, *THOROUGH, *EXHAUSTIVE], [*ONLY_BETWEEN, *ONLY_BETWEEN_THOROUGH]
    (chief, _), _, _ = over("mpi", *equal, *between)
    check_equal_to_one_process(chief, equal)
    assert all(chief[name]["between"] == 0 for name in between)


def test_an_overflow_in_one_process_skips_the_step_in_all(job):
    (chief, _), _, _ = job
    found = chief["loss_scaling_outside"]
    assert found["scale"] == found["in_one"] == 2.0  # halved once an epoch


def test_the_learning_rate_warms_up_batch_by_batch_and_then_follows_its_schedule(job):
    ranks, _, output = job
    warmup = [0.2 / SIZE * (1 + (SIZE - 1) * step / 8) for step in range(1, 9)]
    for rank in ranks:
        assert rank["callbacks"]["rates"] == pytest.approx(warmup + [0.2] * 4 + [0.1] * 4)
        assert rank["callbacks"]["history"]["lr"] == pytest.approx([0.15, 0.2, 0.2, 0.1])
    assert output.count("Epoch 2: finished gradual learning rate warmup to 0.2.") == 1


def test_the_metrics_of_an_epoch_are_the_means_over_the_processes(job):
    ranks, _, _ = job
    losses = np.array([rank["callbacks"]["losses"] for rank in ranks])
    assert not np.allclose(losses[0], losses[1])
    for rank in ranks:
        np.testing.assert_allclose(rank["callbacks"]["history"]["loss"], losses.mean(axis=0), rtol=1e-12)


def test_values_cross_the_processes(over):
    ranks, _, _ = over("gloo", *OVER["gloo"])
    expected = {"allreduce": 0.5, "sum": [1, 2], "allgather": [0, 1], "broadcast": 8, "variable": 1.0, "size": 2}
    assert [rank["values"] for rank in ranks] == [expected] * 2


@pytest.mark.thorough
def test_the_launcher_starts_it_over_gloo_and_tensorflow_is_configured_afterwards(tmp_path):
    (tmp_path / "which.py").write_text(
        "import runpy; import tfdist.horovod as hvd; hvd.init(); print('gloo', hvd.gloo_enabled(), flush=True)\n"
        "runpy.run_module('tests.processes.facade_job', run_name='__main__')"
    )
    with RunningJob("--verbose", "--workers", SIZE, "which.py", tmp_path, "sgd", "values", cwd=tmp_path) as job:
        code, out, err = job.end()
    assert code == 0, err
    assert out.count("gloo True") == SIZE
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(SIZE)]
    check_equal_to_one_process(results[0], ["sgd"])
    assert [found["values"]["size"] for found in results] == [SIZE] * SIZE


ELSEWHERE = """
import sys
sys.modules["horovod"] = sys.modules["tfdist"] = None  # neither is there
import keras, numpy as np
model = keras.saving.load_model(sys.argv[1])
assert type(model.optimizer) is keras.optimizers.Adam and int(model.optimizer.iterations) == 8
weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
np.testing.assert_array_equal(weights, np.load(sys.argv[2]))
model.fit(np.ones((4, 64)), np.ones(4), verbose=0)
print("trained on")
"""


@pytest.mark.thorough
def test_a_saved_model_loads_in_stock_keras_without_horovod(over):
    ranks, folder, _ = over("gloo", *OVER["thorough"])
    command = [sys.executable, "-c", ELSEWHERE, folder / "model.keras", folder / "weights.npy"]
    done = subprocess.run(
        command, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained on\n"
    # `hvd.load_model` went on from it, with rank 0's weights and optimizer.
    assert ranks[0]["checkpoints"] == {"between": 0.0, "kind": "Adam", "iterations": 16}


@pytest.mark.exhaustive  # in one process tests/test_documents.py runs them
def test_the_ports_of_horovods_own_examples_train(tmp_path):
    output = horovod_jobs.run("gloo", ROOT / "examples" / "horovod_keras_mnist.py", cwd=tmp_path)
    assert output.count("'accuracy'") == 1  # rank 0 alone prints
    assert (tmp_path / "checkpoint-4.keras").exists()
    output = horovod_jobs.run("gloo", ROOT / "examples" / "horovod_mnist_loop.py", cwd=tmp_path)
    losses = [float(line.split("Loss:")[1]) for line in output.splitlines() if "Loss:" in line]
    assert len(losses) == 8 and losses[-1] < losses[0] / 4
    assert (tmp_path / "checkpoints" / "mnist-1.index").exists()
