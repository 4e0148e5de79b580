"""Every operation of a `ProcessGroup`, over each engine, on two and three processes, in a graph and outside."""

import signal
import sys
import time

import pytest

from tests.processes.jobs import ROOT, RunningJob, Several, require_horovod
from tests.processes.test_horovod import run

require_horovod()

SCRIPT = """
import sys
import numpy as np, tensorflow as tf
from tfdist import groups, strategy
from tfdist.groups import mpi
from tfdist.groups.horovod import HorovodGroup
from tfdist.groups.mpi import MpiGroup
from tfdist.errors import UsageError

engine = sys.argv[1]
if engine == "mpi4py":
    found = MpiGroup()
elif engine == "sockets":
    found = strategy("multiworker").group
elif engine == "MPI":
    found = HorovodGroup()
else:
    found = strategy("horovod").group
rank, size = found.rank, found.size
assert found.engine == {"mpi4py": "MPI"}.get(engine, engine)
mine = tf.range(4 * size, dtype=tf.float32) * (rank + 1.0)
ranks_sum = sum(range(1, size + 1))
everything = np.arange(4 * size, dtype=np.float32) * ranks_sum


def operations():
    small = [tf.cast(mine, dtype) for dtype in (tf.float16, tf.float64, tf.int32, tf.int64, tf.bfloat16, tf.int8)]
    sums = found.all_reduce([mine, tf.constant(1.0), *small], "sums")
    table = tf.IndexedSlices(tf.fill([1, 3], rank + 1.0), tf.constant([rank]), tf.constant([9, 3]))
    (rows,) = found.all_reduce([table], "rows")
    scattered = [found.reduce_scatter(one, f"scattered.{one.dtype.name}") for one in (mine, *small)]
    gathered = found.all_gather(tf.fill([rank + 1, 2], rank), "gathered")
    seeds = found.all_gather(tf.cast(tf.fill([1], rank + 7), tf.uint32), "seeds")
    said = found.broadcast(tf.constant([rank + 5]), "said", root=size - 1)
    return sums, tf.convert_to_tensor(rows), scattered, gathered, seeds, said


def check(way):
    sums, rows, scattered, gathered, seeds, said = way()
    assert float(sums[1]) == size  # a constant of the graph too is added up
    for total in (sums[0], *sums[2:]):
        np.testing.assert_allclose(tf.cast(total, tf.float32), everything, rtol=0.01)
    np.testing.assert_array_equal(rows, [[i + 1] * 3 if i < size else [0] * 3 for i in range(9)])
    for part in scattered:
        np.testing.assert_allclose(tf.cast(part, tf.float32), everything[4 * rank : 4 * rank + 4], rtol=0.01)
    np.testing.assert_array_equal(gathered, [[r] * 2 for r in range(size) for _ in range(r + 1)])
    np.testing.assert_array_equal(seeds, np.arange(size) + 7)
    np.testing.assert_array_equal(said, [size + 4])


check(operations)
check(tf.function(operations, autograph=False))
found.dense_below_bytes = 1 << 20
table = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, rank]), tf.constant([9, 3]))
(rows,) = found.all_reduce([table], "dense rows")
assert list(rows.indices.numpy()) == list(range(size))
np.testing.assert_array_equal(rows.values[0], [size + 1.0] * 3)
assert found.exchange(b"x" * rank) == [b"x" * r for r in range(size)]
groups.GATHERED_BYTES, mpi.MOST_ELEMENTS = 1000, 3
long = [bytes([r]) * 3001 * r for r in range(size)]
assert found.exchange(long[rank]) == long
check(operations)


def check_messages():
    following, previous = (rank + 1) % size, (rank - 1) % size
    # Large ones to each other at once; in pieces over MPI.
    large = np.arange(1_000_003) + rank
    mpi.MOST_ELEMENTS = 1_000_000
    found.send(large, following)
    np.testing.assert_array_equal(found.receive(previous), large - rank + previous, strict=True)
    for number in range(6):
        found.send(tf.fill([number, 2], tf.cast(number, tf.bfloat16)), following, tag=number % 2)
    for tag in (1, 0):
        for number in range(tag, 6, 2):
            values = found.receive(previous, tag)
            assert values.dtype.name == "bfloat16" and values.shape == (number, 2) and (values == number).all()
    assert found.probe() == found.probe(tag=1) == []
    found.barrier()
    found.send(np.array(rank > 0), following, tag=7)
    while not found.probe(tag=7):
        pass
    found.all_reduce([mine], "between")
    assert found.probe(tag=7) == [previous] and found.receive(previous, tag=7).item() == (previous > 0)


def check_there_are_none():
    for call in (lambda: found.send(mine, (rank + 1) % size), lambda: found.receive((rank + 1) % size), found.probe):
        try:
            call()
        except UsageError as error:
            assert "`HorovodGroup` has only collective operations" in error.sentence
        else:
            raise AssertionError


# What one process knows while it makes its graph is sent in each turn of a loop, as the others do.
for rows in (1, 0):
    @tf.function(autograph=False)
    def turns(changing):
        def turn(number, total):
            mine_now = changing * tf.cast(number + 1, tf.float32) if rank == 0 else tf.zeros([rows])
            parts = found.all_gather(mine_now, f"turn.{rows}")
            return number + 1, total + tf.reduce_sum(parts)

        with found.around_branches():
            number, total = tf.while_loop(lambda number, total: number < 3, turn, (tf.constant(0), tf.constant(0.0)))
            found.note_branches(number)
        return total

    assert float(turns(tf.constant([1.0]))) == 6

check_messages() if hasattr(found, "mailbox") else check_there_are_none()
found.barrier()
print("ALL RIGHT")
"""


def check_operations(folder, engines, workers, options=()):
    job = Several(folder, {f"over {engine}": (SCRIPT, [engine]) for engine in engines}, workers, options)
    for engine in engines:
        assert job.printed(f"over {engine}") == ["ALL RIGHT\n"] * workers


# In jobs of their own, as strategies use them: Horovod's thread would call MPI beside mpi4py. Both in one process have
# ended by SIGSEGV once, with Open MPI 4.1.4.
@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["MPI", "mpi4py"])
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_all_operations_over_mpi_give_every_process_what_they_promise(tmp_path, workers, engine):
    check_operations(tmp_path, [engine], workers, ("--mpi",))


@pytest.mark.exhaustive  # with two processes `test_shared_jobs.py` runs them
@pytest.mark.parametrize("engine", ["Gloo", "sockets"])
def test_all_operations_give_three_processes_what_they_promise(tmp_path, engine):
    check_operations(tmp_path, [engine], 3)


LOST = """
import sys, time
import numpy as np, tfdist

name, options = sys.argv[1], eval(sys.argv[2])
strategy = tfdist.strategy(name, timeout_seconds=5.0, **options)
found = strategy.group
if found.rank == 1:
    found.send(np.ones(3), 0)
    print("sent", flush=True)
    time.sleep(100)
with strategy.guard():
    assert found.receive(1).sum() == 3
    found.receive(1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("strategy", "options", "launch"),
    [
        pytest.param("multiworker", {"communication": "sockets"}, (), id="sockets"),
        pytest.param("mpi_split", {}, ("--mpi",), id="mpi4py", marks=pytest.mark.exhaustive),
    ],
)
def test_one_that_is_killed_or_stopped_while_another_receives_is_named(tmp_path, number, strategy, options, launch):
    (tmp_path / "script.py").write_text(LOST)
    with RunningJob("--verbose", *launch, "script.py", strategy, options, cwd=tmp_path) as job:
        job.wait_for(lambda: any("sent" in path.read_text() for path in tmp_path.glob("logs/*/*.log")))
        time.sleep(0.5)
        job.process("worker", 1).send_signal(number)
        began = time.monotonic()
        code, out, err = job.end(90)
        assert time.monotonic() - began < 30
        assert job.left() == []
    assert code != 0
    assert ("rank 1" if launch else "worker 1") in out + err and "Traceback" not in err


# Asks Open MPI itself, by the tools' interface that MPI's standard describes.
YIELDS = """
import ctypes, sys
if sys.argv[1] == "mpi4py":
    from tfdist.groups.mpi import MpiGroup as ProcessGroup
else:
    from tfdist.groups.horovod import HorovodGroup as ProcessGroup
ProcessGroup()
library = ctypes.CDLL(next(line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line))
index, count, handle, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_bool()
assert library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int())) == 0
assert library.MPI_T_cvar_get_index(b"mpi_yield_when_idle", ctypes.byref(index)) == 0
assert library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
assert library.MPI_T_cvar_read(handle, ctypes.byref(value)) == 0
print("yields:", value.value)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["MPI", pytest.param("mpi4py", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("said", "found"),
    [({}, True), pytest.param({"OMPI_MCA_mpi_yield_when_idle": "0"}, False, marks=pytest.mark.exhaustive)],
)
def test_who_waits_in_mpi_gives_its_core_away_unless_the_user_says_otherwise(tmp_path, engine, said, found):
    (tmp_path / "script.py").write_text(YIELDS)
    command = ("mpirun", "--allow-run-as-root", "-np", "1", sys.executable, "script.py", engine)
    done = run(*command, cwd=tmp_path, PYTHONPATH=str(ROOT), **said)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"yields: {found}" in done.stdout


STEPS = """
import keras, numpy as np, tensorflow as tf
from tensorflow.python.ops import collective_ops
import tfdist

strategy = tfdist.strategy("multiworker", communication="sockets")
sums, add_up = [], strategy.group.sockets.sum

def noted(values):
    sums.append(values.size)
    return add_up(values)

def unexpected(*arguments, **named):
    raise AssertionError("a collective operation of TensorFlow")

class Alone(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):  # TensorFlow reads a metric's variables when they are reset
        collective_ops.all_reduce_v2 = collective_ops.all_gather_v2 = unexpected

strategy.group.sockets.sum = noted
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
x = np.random.default_rng(0).normal(size=(38, 2)).astype("f")
data = {"x": x, "y": x[:, :1], "batch_size": 4, "shuffle": False, "verbose": 0}
before = model.get_weights()
history = strategy.fit(model, **data, callbacks=[Alone()]).history
one = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
one.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
one.set_weights(before)
theirs = one.fit(**data).history
close = all(np.allclose(history[name], theirs[name], rtol=1e-5) for name in theirs)
steps = sums[sums.index(3):]
print("AS ONE", close, list(theirs), "gradients", steps.count(3), "metrics", 0 < steps.count(4) < 10)
"""


def test_a_step_by_sockets_is_one_exchange_metrics_are_added_up_between_calls_and_nothing_else_is_used(tmp_path):
    (tmp_path / "script.py").write_text(STEPS)
    done = run(sys.executable, "-m", "tfdist.launch", "--verbose", "--workers", "2", "script.py", cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    ten_steps = "AS ONE True ['loss', 'mae'] gradients 10 metrics True"
    assert done.stdout.count(ten_steps) == 2, done.stdout[-3000:]
