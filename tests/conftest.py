"""Three logical CPU devices for every test, or the other processes of its job, before anything starts TensorFlow."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest

from tfdist import startup

startup.require_tensorflow_backend()

import tensorflow as tf  # noqa: E402 - it comes with Keras, a sixth faster than by itself

TOGETHER = "TF_CONFIG" in os.environ  # with other processes, which run the same tests, or serve this one
if not TOGETHER:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
    )
# Tests run one process a core; more threads would only wait for each other.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)


def pytest_configure(config):
    names = config.getoption("--strategies").split(",")
    if TOGETHER and names[0] in ("multiworker", "parameter_server"):
        import tfdist

        # TensorFlow must know the others when it starts.
        tfdist.strategy(names[0])


def pytest_addoption(parser):
    parser.addoption(
        "--strategies",
        default="single,mirrored,custom",
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
