"""`tfdist memory`: the memory of a training, before anything is allocated."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import keras
import pytest
import tensorflow as tf
from click.testing import CliRunner

import tfdist
from benchmarks import estimates
from tfdist import machine, memory, terminal
from tfdist.__main__ import main
from tfdist.internals import tensorflow_graphs as graphs
from tfdist.loop import peak_memory
from tfdist.loop.bfc_allocator import BfcAllocator
from tfdist.loop.while_loops import WhileLoop

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_figures(tmp_path, monkeypatch):
    """Figures of this machine are measured for each test, and those of the user stay as they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def measured_base():
    """A machine on which TensorFlow's own memory is known."""
    machine.figure("framework_bytes", lambda: 700.0 * MIB, tfdist=tfdist.__version__)
    machine.figure("operation_bytes", lambda: 50_000.0, tfdist=tfdist.__version__)


def test_weights_gradients_and_slots_are_those_of_the_variables():
    found, examples = memory.of_step("mlp", "digits", 16, optimizer="adam")
    source = tfdist.data.load("digits")
    model = tfdist.models.build("mlp", source.spec)
    parameters = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    assert found.weights == pytest.approx(4 * parameters, abs=64)  # and a seed
    assert found.gradients == 4 * parameters
    assert found.slots == pytest.approx(8 * parameters, abs=64)  # and a counter and a rate
    stored = [source.feed(split, 16).arrays for split in source.spec.examples]
    assert examples == sum(array.numpy().nbytes for array in tf.nest.flatten(stored))


@pytest.mark.thorough
def test_activations_grow_with_the_batch_and_shrink_with_recomputation():
    options = {"task": "classification", "shape": (32, 32, 3)}
    small, large = (memory.of_step("resnet20", "synthetic", size, data_options=options)[0] for size in (8, 32))
    assert 3.5 < large.activations / small.activations < 4.5
    again, _ = memory.of_step("resnet20", "synthetic", 32, data_options=options, recompute="blocks")
    assert again.activations < 0.6 * large.activations
    assert again.weights == large.weights


def loops_of_an_lstm(length, batch_size=4, units=8):
    """The forward loop and the backward loop of an LSTM over `length` words, and the graph of its gradients."""
    layer = keras.layers.LSTM(units)
    layer.build((batch_size, length, units))

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x))
        return tape.gradient(loss, [x, *(weight.value for weight in layer.trainable_weights)])

    graph = gradients.get_concrete_function(tf.TensorSpec((batch_size, length, units))).graph
    forward, backward = [operation for operation in graph.get_operations() if graphs.is_loop(operation)]
    return forward, backward, graph


@pytest.mark.parametrize("length", [5, 20])
def test_an_lstm_keeps_its_gates_and_states_of_each_step_for_the_backward_pass(length):
    forward, backward, _ = loops_of_an_lstm(length)
    loop = WhileLoop(forward)
    assert loop.iterations == length
    kept = [
        size
        for tensor, size in zip(forward.outputs, loop.result_bytes([0] * len(forward.inputs)), strict=True)
        if tensor.dtype == tf.variant
    ]
    # Three gates, the tanh of the input and of the cell state, and both states of the step before, which the layer's
    # steps share; the output has one element, and counters are below 100 bytes per step.
    of_tensor = 4 * 4 * 8
    assert sum(kept) == pytest.approx(7 * length * of_tensor + of_tensor, abs=100 * length)
    assert WhileLoop(backward).iterations == length


def test_the_lists_of_a_loop_are_in_memory_until_the_loop_of_the_backward_pass_has_emptied_them():
    def peak(length):
        graph = loops_of_an_lstm(length)[2]
        found = peak_memory.Memory()
        peak_memory.Execution(graph.get_operations(), graphs.needed(graph), inputs_exist=True).run(found)
        assert found.in_use == 0
        return found.peak

    per_step = (peak(200) - peak(100)) / 100
    # The lists, and the input in another order and as a list.
    assert per_step == pytest.approx((7 + 2) * 4 * 4 * 8, rel=0.2)


def test_a_loop_that_depends_on_the_data_has_at_most_as_many_iterations_as_its_limit():
    @tf.function
    def total(x):
        return tf.while_loop(lambda s: s < 3.0, lambda s: (s + x,), (x,), maximum_iterations=7)[0]

    graph = total.get_concrete_function(tf.TensorSpec(())).graph
    (loop,) = [operation for operation in graph.get_operations() if graphs.is_loop(operation)]
    assert graphs.most_iterations(loop) == WhileLoop(loop).iterations == 7


def test_a_chunk_of_the_allocator_is_cut_only_if_it_is_twice_as_large():
    allocator = BfcAllocator()
    chunks = [allocator.allocate(8 * MIB) for _ in range(2)]
    assert allocator.touched_bytes == 16 * MIB
    allocator.free(chunks[0])
    allocator.allocate(5 * MIB)  # takes the whole chunk
    allocator.allocate(3 * MIB)
    assert allocator.touched_bytes == (16 + 3) * MIB
    allocator.free(chunks[1])
    allocator.allocate(4 * MIB)  # takes half of it
    allocator.allocate(4 * MIB)
    assert allocator.touched_bytes == (16 + 3) * MIB


def test_neighbouring_chunks_are_joined_when_they_are_free():
    allocator = BfcAllocator()
    for chunk in [allocator.allocate(MIB) for _ in range(2)]:
        allocator.free(chunk)
    allocator.allocate(2 * MIB)
    assert allocator.touched_bytes == 2 * MIB


def test_the_total_is_the_sum_of_the_rows(measured_base):
    typed = "memory --model mlp --dataset digits --strategy mirrored --replicas 2"
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 0, result.output
    rows = dict(re.findall(r"^(\w+) +([\d.]+)$", result.stdout, re.M))
    assert list(rows) == [*(field.name for field in dataclasses.fields(memory.Estimate)), "total"]
    *sizes, total = map(float, rows.values())
    assert sizes[0] == 700
    assert total == pytest.approx(sum(sizes), abs=0.5)
    assert "Measuring" not in result.output


def test_a_process_with_all_replicas_has_the_tensors_of_each(measured_base):
    of_one = memory.Estimate(*range(1, 10))
    assert of_one.of_process("multiworker", 2) == of_one
    assert of_one.of_process("mirrored", 2) == memory.Estimate(1, 4, 3, 8, 10, 12, 14, 16, 9)
    assert of_one.of_process("custom", 2) == memory.Estimate(1, 4, 3, 4, 10, 6, 14, 16, 9)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_estimate_is_within_15_percent_of_a_process_and_the_framework_is_measured_once(monkeypatch):
    said = []
    monkeypatch.setattr(terminal, "say", said.append)
    options = {"task": "text_classification", "words": 20000, "length": 128, "train": 256, "validation": 128}
    for model, dataset, batch_size, data_options in (
        ("mlp", "digits", 32, {}),
        ("bilstm", "synthetic", 128, options | {"test": 128}),
    ):
        estimated = memory.estimate(model, dataset, batch_size, data_options=data_options)
        measured = memory.trained_bytes(model, dataset, batch_size, data_options, {})
        assert estimated.total == pytest.approx(measured, rel=estimates.TARGET)
    assert said == ["Measuring TensorFlow's own memory, once per machine ..."]


def test_a_training_that_fails_is_one_sentence_with_a_hint():
    with pytest.raises(tfdist.errors.ClusterError, match="training of `nothing` could not be measured") as error:
        memory.trained_bytes("nothing", "digits", 8, {}, {})
    assert "Unknown model `nothing`" in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        ("--strategy pipeline", "The memory of `pipeline` cannot be estimated", "--balance memory"),
        ("--strategy mirorred", "Unknown strategy `mirorred`", "mirrored"),
        (
            "--strategy custom --replicas 64",
            "`--batch-size` is 32, and `--replicas` is 64",
            "at most one replica per example",
        ),
        ("--replicas 2", "`--replicas` is 2, and `single` has one", "--strategy NAME"),
        ("--recompute middle", "middle", "dense"),
    ],
)
def test_bad_input_is_one_sentence_with_a_hint(options, sentence, hint):
    result = CliRunner().invoke(main, f"memory --model mlp --dataset digits {options}".split())
    assert result.exit_code == 2
    assert sentence in result.output
    assert hint in result.output


def test_an_estimate_shows_nothing_that_tensorflow_logs_and_its_own_errors(measured_base):
    command = [sys.executable, "-m", "tfdist.memory", "--model", "mlp", "--dataset"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    for dataset, begins in (("digits", ""), ("nowhere", "error: Unknown dataset `nowhere`")):
        done = subprocess.run([*command, dataset], check=False, capture_output=True, text=True, env=environment)
        assert done.stderr.startswith(begins) and bool(done.stderr) == bool(begins)
