"""A notebook, run by a real kernel: what its cells show, and the jobs that they start."""

import os
import re

import psutil
import pytest

import tfdist
from tfdist.errors import TfdistError, UsageError

nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

DEFINE = """
import tfdist
import keras

x, y = tfdist.data.load("digits").arrays("train")

def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model

def train(name, rate=1.0):
    strategy = tfdist.strategy(name, seed=1)
    with strategy.scope():
        model = build()
    strategy.prepare(model)
    print("trains with", strategy.num_replicas, flush=True)
    model.fit(x[:256], y[:256], batch_size=32, epochs=1, verbose=0)
    return model.get_weights()

def fail():
    if tfdist.strategy("multiworker").world.rank == 1:
        raise ValueError("the rate is negative")
"""
MIRRORED = """
strategy = tfdist.strategy("mirrored", devices=2, seed=1)
with strategy.scope():
    model = build()
strategy.prepare(model)
model.fit(x[:256], y[:256], batch_size=32, epochs=1, verbose=0)
strategy
"""
LAUNCH = """
by_rank = tfdist.launch_notebook(train, args=("multiworker",), workers=2)
[float(abs(mine - theirs).max()) < 1e-6 for weights in by_rank for mine, theirs in zip(weights, model.get_weights())]
"""
# A line that TensorFlow logs at the level INFO, from Python or from C++.
NOTE = re.compile(r"^(INFO|I\d{4} )", re.MULTILINE)


def executed(tmp_path, *cells):
    """Runs a notebook of these cells, and returns them with their outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    # In a test, the kernel would not show what is written to the file descriptors of its output.
    client.execute(env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"})
    return notebook.cells


def text(cell):
    """What a cell shows, as text."""
    shown = []
    for output in cell.outputs:
        shown.append(output.get("text", ""))
        shown.append(output.get("data", {}).get("text/plain", ""))
        shown.append("\n".join(output.get("traceback", ())))
    return "".join(shown)


def test_a_notebook_trains_on_two_replicas_and_in_two_processes_and_shows_no_notes_of_tensorflow(tmp_path):
    _, source, mirrored, launched, failed, late = executed(
        tmp_path,
        DEFINE,
        "tfdist.data.load('digits')",
        MIRRORED,
        LAUNCH,
        "tfdist.launch_notebook(fail)",
        "tfdist.strategy('mirrored', devices=3)",
    )
    assert text(source) == (
        "<tfdist data `digits` for classification: 1347 train, 150 validation, 300 test examples of shape (8, 8, 1); "
        "10 classes>"
    )
    assert not NOTE.search(text(mirrored))
    assert text(mirrored).endswith("<tfdist strategy `mirrored`: 2 replicas on CPU:0, CPU:1>")
    assert "\ntrains with 2\n" in "\n" + text(launched)
    assert "[worker 1] trains with 2\n" in text(launched)
    assert not NOTE.search(text(launched))
    assert text(launched).endswith("[True, True, True, True]")
    assert "worker 1 (" in text(failed)
    assert "raised `ValueError`: the rate is negative" in text(failed)
    assert "in fail" in text(failed)  # the traceback of the process
    assert "restart the kernel" in text(late)


def test_an_interrupted_cell_ends_its_processes(tmp_path):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        kernel = psutil.Process(manager.provisioner.pid)
        asked = client.execute(
            "import tfdist, time\n"
            "def wait():\n    print('waits', flush=True)\n    time.sleep(100)\n"
            "tfdist.launch_notebook(wait)"
        )
        while "waits" not in str(client.get_iopub_msg(timeout=60)["content"].get("text")):
            pass
        below = kernel.children(recursive=True)
        assert len([p for p in below if "tfdist.launcher.script" in p.cmdline()]) == 2
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != asked:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert psutil.wait_procs(below, 10)[1] == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Unreadable:
    """An object that can be pickled, and not unpickled."""

    def __reduce__(self):
        return (int, ("x",))


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda: os._exit(0), "The function `<lambda>` ended process 0 with exit code 0 instead of returning"),
        (Unreadable, "What the function returned in process 0 cannot be read here: ValueError: invalid literal"),
        (
            lambda: [].remove(1) if os.environ["TF_CONFIG"] else None,
            "raised `ValueError`: list.remove(x): x not in list",
        ),
    ],
)
def test_a_function_that_returns_nothing_readable_is_an_error(function, sentence):
    with pytest.raises(TfdistError, match=re.escape(sentence)):
        tfdist.launch_notebook(function, workers=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"workers": 0}, "`workers` is 0"),
        ({"workers": 1.5}, "cannot have `1.5` as `workers`"),
        ({"workers": None}, "cannot have `None` as `workers`"),
        ({"ps": -1}, "`ps` is -1"),
        ({"args": 3}, "cannot have `3` as `args`"),
        ({"function": "train.py"}, "cannot have `train.py` as `function`"),
    ],
)
def test_wrong_arguments_are_refused_before_a_process_starts(arguments, sentence):
    with pytest.raises(UsageError, match=sentence):
        tfdist.launch_notebook(**{"function": print} | arguments)
