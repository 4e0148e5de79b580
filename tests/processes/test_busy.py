"""A process that is busy is alive: the others wait for it, and say so; one that is stopped meanwhile is still found."""

import re
import signal
import time

import pytest

from tests.processes.jobs import RunningJob, require_horovod, require_mpi

pytestmark = pytest.mark.thorough

EXHAUSTIVE = pytest.mark.exhaustive
BUSY = """
import sys, time
import keras, numpy as np, tfdist

name, seconds, options = sys.argv[1], float(sys.argv[2]), eval(sys.argv[3])
strategy = tfdist.strategy(name, **options)
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if strategy.world.is_chief and epoch == 0:
            print("saving", flush=True)
            time.sleep(seconds)

strategy.fit(model, x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[Slow()])
# In one piece, since the others write there too.
sys.stdout.write("END\\n")
"""
ENGINES = {
    "sockets": ("multiworker", {}, ()),
    "ring": ("multiworker", {"communication": "ring"}, ()),
    "Gloo": ("horovod", {}, ()),
    "MPI": ("horovod", {}, ("--mpi",)),
    "mpi4py": ("mpi_split", {}, ("--mpi",)),
}


def engines(*quick):
    """Runs a test over all engines; all but the `quick` ones are left to `make test-all`."""
    marks = {name: () if name in quick else EXHAUSTIVE for name in ENGINES}
    cases = [pytest.param(*case, id=name, marks=marks[name]) for name, case in ENGINES.items()]
    return pytest.mark.parametrize(("strategy", "options", "launch"), cases)


def busy(tmp_path, strategy, launch, seconds, **options):
    if strategy == "horovod":
        require_horovod()
    if launch:
        require_mpi()
    (tmp_path / "busy.py").write_text(BUSY)
    arguments = ("--verbose", *launch, "busy.py", strategy, seconds, options)
    return RunningJob(*arguments, cwd=tmp_path)


@engines("sockets")
def test_a_chief_that_saves_for_longer_than_others_may_be_silent_is_waited_for(tmp_path, strategy, options, launch):
    with busy(tmp_path, strategy, launch, 10, timeout_seconds=3.0, **options) as job:
        code, out, err = job.end()
    assert code == 0, err
    assert out.count("END") == 2
    (line,) = [line for line in (out + err).splitlines() if "Waiting for" in line]
    who = "rank" if launch else "worker"
    assert re.search(rf"Waiting for {who} 0\b.*: alive, and busy for [3-6] s so far", line)


@engines("Gloo")
def test_that_wait_can_be_bounded(tmp_path, strategy, options, launch):
    limits = {"timeout_seconds": 2.0, "callback_timeout_seconds": 4.0}
    with busy(tmp_path, strategy, launch, 100, **limits, **options) as job:
        code, out, err = job.end(90)
        assert job.left() == []
    assert code == 3, err
    assert "Busy for longer than 4 s (`callback_timeout_seconds`) while others waited:" in out + err
    assert "Traceback" not in out + err


@engines("sockets")
def test_one_that_is_stopped_while_it_is_busy_is_found_in_time(tmp_path, strategy, options, launch):
    with busy(tmp_path, strategy, launch, 100, timeout_seconds=5.0, **options) as job:
        job.wait_for(lambda: _said(tmp_path, "saving"))
        began = time.monotonic()
        job.process("worker", 0).send_signal(signal.SIGSTOP)
        code, out, err = job.end(90)
        assert time.monotonic() - began < 30
        assert job.left() == []
    assert code == 3, err
    assert f"Gone, or silent for 5 s: {'rank' if launch else 'worker'} 0" in out + err


def _said(tmp_path, text):
    return any(text in path.read_text() for path in tmp_path.glob("logs/*/*.log"))
