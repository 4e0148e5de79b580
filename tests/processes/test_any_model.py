"""Models of any kind in two processes: what they answer, and that both processes hold the same."""

import pytest

from tests.processes.jobs import Several, run_script

pytestmark = pytest.mark.thorough

OUTPUTS = """
import sys
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0, **eval(sys.argv[2]))
import keras
import numpy as np
import tensorflow as tf

lengths = [1, 3, 0, 2, 0] * 2 + [1]
rows = tf.RaggedTensor.from_row_lengths(np.arange(sum(lengths), dtype="float32") - 3, lengths)


class Answers(keras.Model):
    def call(self, x):
        dense = x.to_tensor(shape=[None, 3])
        words = tf.strings.as_string(dense, precision=1) + tf.constant(bytes([0xC3, 0xA9, 0, 0xFF]))
        answers = {
            "ragged": x * 2,
            "ragged words": tf.ragged.map_flat_values(tf.strings.as_string, x),
            "deeper": tf.stack([x, x], axis=1),
            "sparse": tf.sparse.from_dense(dense),
            "words": words,
            "bool": dense > 0,
            "float64": tf.cast(dense, "float64"),
            "complex64": tf.complex(dense, -dense),
            "complex128": tf.cast(tf.complex(dense, -dense), "complex128"),
        }
        kinds = ("float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
        return answers | {kind: tf.cast(tf.abs(dense), kind) for kind in kinds}


with strategy.scope():
    model = Answers()
found = strategy.predict(model, rows, batch_size=4, verbose=0)
expected = Answers().predict(rows, batch_size=4, verbose=0)
assert found.keys() == expected.keys()


def plain(value):
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.to_dense(value).numpy()
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value.tolist()


for name, value in expected.items():
    assert found[name].dtype == value.dtype, name
    assert plain(found[name]) == plain(value), (name, plain(found[name]), plain(value))
print("ALL RIGHT")
"""

ADVERSARIES = """
import sys
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0)
import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
keras.utils.set_random_seed(1)


class Critic(keras.Model):
    def __init__(self):
        super().__init__()
        self.part = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.error = keras.metrics.Mean(name="error")
        self.built = True  # Keras' own callback asks for it

    def compile(self, optimizer):
        super().compile(optimizer=None)
        self.critics = {"optimizer": optimizer}
        optimizer.build(self.part.trainable_variables)

    @property
    def metrics(self):
        return [self.error]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            error = tf.reduce_mean((self.part(x) - 1) ** 2)
        variables = self.part.trainable_variables
        self.critics["optimizer"].apply_gradients(zip(tape.gradient(error, variables), variables))
        self.error.update_state(error)
        return {"error": self.error.result()}


class Ends(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and sys.argv[3] == "first":
            raise SystemExit(0)


with strategy.scope():
    model = Critic()
    model.compile(keras.optimizers.Adam(0.05))
backup = keras.callbacks.BackupAndRestore(f"{sys.argv[2]}-{'' if strategy.world.is_chief else 'not '}chief")
history = strategy.fit(model, x, batch_size=8, epochs=4, verbose=0, callbacks=[backup, Ends()])
optimizer = model.critics["optimizer"]
mine = [np.asarray(v).tolist() for v in [*model.variables, *optimizer.variables]]
everywhere = strategy.exchange(str(mine).encode())
assert len(set(everywhere)) == 1, everywhere
assert (sys.argv[3] == "whole") == (history.epoch == [0, 1, 2, 3])
weights = np.round(model.get_weights()[0].ravel(), 5).tolist()
# One write a line: mpirun puts what two processes write in pieces into each other.
sys.stdout.write(f"ITERATIONS {int(optimizer.iterations.numpy())} WEIGHTS {weights}\\n")
"""

ON_BATCH = """
import sys
import tfdist

strategy = tfdist.strategy(sys.argv[1], seed=0)
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(19, 4)).astype("float32")
y = x[:, :1]
weights = np.ones((4, 1), "float32")


def model_of(scope):
    keras.utils.set_random_seed(strategy.world.rank)  # each process has first values of its own
    with scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


model, plain = strategy.prepare(model_of(strategy.scope())), model_of(keras.name_scope("plain"))
model.train_on_batch(x, y)
(kernel, bias) = model.get_weights()
assert len(set(strategy.exchange(str(kernel.tolist()).encode()))) == 1
plain.set_weights([kernel, bias])
for rows in (7, 19):
    for one in ("train_on_batch", "test_on_batch"):
        found, expected = (getattr(m, one)(x[:rows], y[:rows]) for m in (model, plain))
        np.testing.assert_allclose(found, expected, rtol=5e-5)
np.testing.assert_allclose(model.predict_on_batch(x), plain.predict_on_batch(x), rtol=5e-5, atol=5e-5)
print("ALL RIGHT")
"""


# Over sockets and Gloo `test_shared_jobs.py` runs the scripts of predictions and of single batches.
@pytest.mark.parametrize(
    ("strategy", "settings", "options"),
    [
        pytest.param("multiworker", {"communication": "ring"}, (), id="ring"),
        pytest.param("horovod", {}, ("--mpi",), id="MPI", marks=pytest.mark.exhaustive),
    ],
)
def test_predictions_of_any_type_are_those_of_one_device(tmp_path, strategy, settings, options):
    assert run_script(OUTPUTS, strategy, str(settings), cwd=tmp_path, options=options).count("ALL RIGHT") == 2


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("multiworker", (), id="sockets"),
        pytest.param("horovod", (), id="Gloo", marks=pytest.mark.exhaustive),
        pytest.param("horovod", ("--mpi",), id="MPI", marks=pytest.mark.exhaustive),
    ],
)
def test_a_backup_that_the_chief_alone_can_read_restores_all_processes(tmp_path, strategy, options):
    run_script(ADVERSARIES, strategy, str(tmp_path / "backup"), "first", cwd=tmp_path, options=options)
    arguments = {"resumed": [strategy, str(tmp_path / "backup"), "resumed"]}
    arguments["whole"] = [strategy, str(tmp_path / "other"), "whole"]
    scripts = {name: (ADVERSARIES, these) for name, these in arguments.items()}
    job = Several(tmp_path, scripts, options=options)
    (result,) = set(job.printed("whole"))
    assert result.startswith("ITERATIONS 16 ")
    assert set(job.printed("resumed")) == {result}


@pytest.mark.exhaustive
def test_single_batches_over_mpi_are_those_of_one_device(tmp_path):
    assert run_script(ON_BATCH, "horovod", cwd=tmp_path, options=("--mpi",)).count("ALL RIGHT") == 2
