"""A process with one of TensorFlow's servers is traced from outside; one that does not answer is named."""

import subprocess
import sys

import pytest

from tests.processes.jobs import clean_environment, free_addresses
from tfdist.profiling import remote as remote_profiler
from tfdist.profiling import trace

SERVER = """
import sys, tensorflow as tf
server = tf.distribute.Server({"worker": [sys.argv[1]]}, job_name="worker", task_index=0)
print("serving", flush=True)
while True:
    tf.linalg.matmul(tf.ones((50, 50)), tf.ones((50, 50)))
"""


@pytest.mark.thorough
def test_a_server_sends_its_trace_and_one_that_is_not_there_is_named(tmp_path):
    here, nowhere = free_addresses(2)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, here],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert server.stdout.readline() == b"serving\n"
        traces = remote_profiler.RemoteTraces({"host-worker-0": here, "host-worker-1": nowhere})
        folder = trace.folder_of(tmp_path, "run")
        with pytest.warns(UserWarning, match="No trace of host-worker-1: .*refused"):
            traces.stop(folder)
    finally:
        server.kill()
        server.communicate()
    assert [path.name for path in folder.iterdir()] == ["host-worker-0.xplane.pb"]
    assert b"MatMul" in (folder / "host-worker-0.xplane.pb").read_bytes()
