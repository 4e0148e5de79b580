"""Three logical CPU devices for every test, or the other processes of its job, before anything starts TensorFlow.

No test uses a GPU but with `--gpu` (`make test-gpu`): a single one is then divided into three logical devices.
"""

import functools
import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import pytest

from tests import selection
from tfdist import startup

startup.require_tensorflow_backend()

import tensorflow as tf  # noqa: E402 - it comes with Keras, a sixth faster than by itself

# Other tests run at the same time, so how long an example takes to draw says nothing.
hypothesis.settings.register_profile(
    "beside others", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("beside others")

TOGETHER = "TF_CONFIG" in os.environ  # with other processes, which run the same tests, or serve this one


def divide_cpu():
    """Makes three logical devices of the CPU."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
    )


if not TOGETHER:
    divide_cpu()
# Tests run one process a core; more threads would only wait for each other.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


# The part of a single GPU's memory that each of three logical devices gets; the rest is for other processes.
GPU_MIB = 4096


def pytest_configure(config):
    if config.getoption("--gpu"):
        use_gpus()
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # for this process, and for those that it starts
    names = config.getoption("--strategies").split(",")
    if TOGETHER and names[0].endswith("_stages"):
        divide_cpu()
    elif TOGETHER and names[0].startswith(("multiworker", "parameter_server")):
        import tfdist

        # TensorFlow must know the others when it starts.
        own = ("_recompute", "_uneven", "_bsp")
        tfdist.strategy(functools.reduce(str.removesuffix, own, names[0].partition("_shard_")[0]))


def use_gpus():
    """Makes GPUs compute as exactly as CPUs; divides a single one."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.experimental.enable_op_determinism()
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) == 1:
        divided = [tf.config.LogicalDeviceConfiguration(memory_limit=GPU_MIB)] * 3
        tf.config.set_logical_device_configuration(gpus[0], divided)


def pytest_collection_modifyitems(config, items):
    """Chooses by `tests/selection.py`, and skips what this machine cannot run."""
    selection.mark_samples(items)
    if commit := config.getoption("--seventh-of"):
        chosen = selection.in_seventh(items, commit)
        config.hook.pytest_deselected(items=list(set(items) - set(chosen)))
        items[:] = chosen
    skip_without_gpu(config, items)


def skip_without_gpu(config, items):
    """With `--gpu` all tests need a GPU, and those in `tests/gpu` need `--gpu`."""
    asked = config.getoption("--gpu")
    if asked and tf.config.list_physical_devices("GPU"):
        return
    reason = "TensorFlow finds no GPU" if asked else "needs a GPU: run `make test-gpu`"
    for item in items:
        if asked or "gpu" in item.path.relative_to(config.rootpath).parts:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_addoption(parser):
    parser.addoption("--seventh-of", metavar="COMMIT", help="run one seventh of the thorough tests, as CI does")
    parser.addoption("--gpu", action="store_true", help="run the tests on the GPUs of this machine")
    parser.addoption(
        "--strategies",
        default="single,mirrored,custom,pipeline",
        help="strategies that the contract suite holds to its promises; `stock_mirrored` is Keras' own fit",
    )


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    """An empty working directory whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test finds what another one, or the user, has left in the folder of the caches."""
    monkeypatch.setenv("TFDIST_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _clean_keras():
    yield
    import keras

    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session(free_memory=False)  # Python collects garbage often enough


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)
