"""Jobs whose processes start by hand, with scripts of users that differ between them, or ports that are taken."""

import json
import subprocess
import sys
import time

import pytest

from tests.processes.jobs import clean_environment, configs, free_addresses, require_horovod, unframed

# The script of worker 1 is an older or a newer one. All processes go on after an error, except after the last.
OTHER_SCRIPTS = """
import functools, json, os, sys, time
import keras, numpy as np, tensorflow as tf, tfdist

is_other = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
name, options = sys.argv[1], json.loads(sys.argv[2])
strategy = tfdist.strategy(name, seed=1, timeout_seconds=20, **options)
x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
y = (x.sum(1) > 0).astype("int64")

def smoothed(labels, predictions, smoothing):
    loss = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
    return loss + smoothing * keras.ops.mean(keras.ops.square(predictions), -1)

def of_numpy(smoothing):
    smoothing = np.float32(smoothing)
    return lambda labels, predictions: smoothed(labels, predictions, smoothing)

def traced(smoothing):
    @tf.function
    def loss(labels, predictions):
        return smoothed(labels, predictions, smoothing)
    return loss

def closure(smoothing):
    return lambda labels, predictions: smoothed(labels, predictions, smoothing)

class Smoothed(keras.losses.Loss):
    def __init__(self, smoothing):
        super().__init__(name="smoothed")
        self.smoothing = smoothing
    def call(self, labels, predictions):
        return smoothed(labels, predictions, self.smoothing)

LOSSES = {
    "logits": lambda value: keras.losses.SparseCategoricalCrossentropy(from_logits=bool(value)),
    "closure": closure,
    "of numpy": of_numpy,
    "traced": traced,
    "partial": lambda value: functools.partial(smoothed, smoothing=value),
    "class": Smoothed,
}

def factor(inputs):
    return 2 * inputs

class Scale(keras.layers.Layer):
    def call(self, inputs):
        return 2 * inputs

if is_other:
    def factor(inputs):
        return 3 * inputs

    class Scale(keras.layers.Layer):
        def call(self, inputs):
            return 3 * inputs

class ScaleByFunction(keras.layers.Layer):
    def call(self, inputs):
        return factor(inputs)

class ScaleByAttribute(keras.layers.Layer):
    factor = 3.0 if is_other else 2.0
    def call(self, inputs):
        return self.factor * inputs

class NotToSave(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.started = time.time()  # which differs between the processes, and may
    def call(self, inputs):
        return inputs
    def get_config(self):
        raise RuntimeError("this layer cannot be saved")

def train(kind="logits", value=1.0, layer=NotToSave, units=16, activation="relu", decay=0.0, policy="float32",
          shuffle=True, epochs=1, weight=1.0, **optimizer):
    # The seeds of the initial weights differ: all begin with the weights of the chief.
    with strategy.scope():
        first = keras.layers.Dense(units, activation, kernel_regularizer=keras.regularizers.L2(decay), dtype=policy)
        model = keras.Sequential([keras.Input((8,)), first, layer(), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(**{"learning_rate": 0.1} | optimizer)
        model.compile(optimizer, LOSSES[kind](value), loss_weights=[weight])
    strategy.fit(model, x, y, batch_size=8, epochs=epochs, shuffle=shuffle, verbose=0)

others = [
    {},
    {"learning_rate": 0.2},
    {"activation": "tanh"},
    {"decay": 0.1},
    {"epochs": 2},
    {"shuffle": False},
    {"policy": "mixed_bfloat16"},
    {"weight": 0.5},
    {"weight_decay": np.float32(0.1)},
    *({"layer": layer} for layer in (Scale, ScaleByFunction, ScaleByAttribute)),
    *({"kind": kind, "value": 0.0} for kind in LOSSES),
]
if strategy.group.carries_tensors:  # otherwise TensorFlow ends the first of these differences, or waits for its timeout
    others += [{"momentum": 0.9}, {"clipnorm": 1.0}, {"units": 8}]
for other in others:
    began = time.monotonic()
    try:
        train(**other if is_other else {name: value for name, value in other.items() if name in ("kind", "layer")})
        print(json.dumps([str(other), "trained", 0]), flush=True)
    except tfdist.errors.DisagreementError as error:
        print(json.dumps([str(other), error.sentence, time.monotonic() - began]), flush=True)
train(**others[-1] if is_other else {})
"""
TAKEN = """
import json, os, socket, sys
import tensorflow as tf, tfdist
from tfdist.jobs import rendezvous

config = json.loads(os.environ["TF_CONFIG"])
task, meet = config["task"], rendezvous.meet

def meet_and_take_port(*arguments):
    result = meet(*arguments)
    if task == json.loads(sys.argv[2]):
        port = int(config["cluster"][task["type"]][task["index"]].rpartition(":")[2])
        globals()["taken"] = socket.create_server(("", port))
    return result

rendezvous.meet = meet_and_take_port
tfdist.strategy(sys.argv[1], start_timeout_seconds=10)
"""


def ended(script, *arguments, folder, roles=("worker", "worker")):
    """The exit code, the output and the errors of each process of a job of one script, in the order of `roles`."""
    (folder / "script.py").write_text(script)
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py", *arguments],
            cwd=folder,
            env=clean_environment() | {"TF_CONFIG": json.dumps(config)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for config in configs(roles, free_addresses(len(roles)))
    ]
    try:
        until = time.monotonic() + 150
        outputs = [process.communicate(timeout=until - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("multiworker", {}, id="sockets"),
        pytest.param("multiworker", {"communication": "ring"}, id="ring", marks=pytest.mark.exhaustive),
        pytest.param("local_sgd", {"sync_every": 2}, id="local_sgd", marks=pytest.mark.thorough),
        pytest.param("horovod", {}, id="horovod", marks=pytest.mark.exhaustive),
    ],
)
def test_another_script_in_one_process_is_refused_at_once_and_ends_with_exit_code_2(tmp_path, strategy, options):
    if strategy == "horovod":
        require_horovod()
    for code, out, err in ended(OTHER_SCRIPTS, strategy, json.dumps(options), folder=tmp_path):
        assert code == 2, err
        alike, *told = [json.loads(line) for line in out.splitlines()]
        assert alike == ["{}", "trained", 0], err
        assert len(told) == (17 if "communication" in options else 20), err
        for other, sentence, seconds in told:
            assert "The processes of the job d" in sentence, other  # "disagree on", or "do different things"
            assert "worker 0" in sentence and "worker 1" in sentence, (other, sentence)
            assert seconds < 10, (other, seconds)  # building the model and tracing included


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "roles", "rank"),
    [("multiworker", ("worker", "worker"), 1), ("parameter_server", ("chief", "ps", "worker"), 1)],
)
def test_a_port_that_is_taken_since_the_processes_met_is_named(tmp_path, strategy, roles, rank):
    task = {"type": roles[rank], "index": roles[:rank].count(roles[rank])}
    results = ended(TAKEN, strategy, json.dumps(task), folder=tmp_path, roles=roles)
    assert [code for code, _, _ in results] == [3] * len(roles), results
    assert all("{type} {index}".format(**task) in unframed(err) for _, _, err in results), results
    assert "its port cannot be listened on" in results[rank][2]
