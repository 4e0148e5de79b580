"""A real trace of a stock `fit`, read by tfdist and served by the real TensorBoard over HTTP."""

import contextlib
import gzip
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests import zoo
from tfdist import models, tasks
from tfdist.callbacks import Profile
from tfdist.errors import RunFolderError, UsageError
from tfdist.profiling import stages, trace

FIRST, LAST = 3, 7
INPUT_SECONDS = 0.05  # what the slow pipeline takes for a batch


def traced_fit(log_dir, *, jit_compile, slow_input=False):
    images = np.random.default_rng(0).random((10 * 32, 28, 28, 1), dtype="float32")
    labels = np.arange(len(images)) % 10
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(32)
    if slow_input:
        data = data.map(lambda x, y: (delayed(x), y))
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit_compile)
    model.fit(data, shuffle=False, callbacks=[Profile(FIRST, LAST, log_dir)], verbose=0)
    return log_dir


def delayed(x):
    def wait(value):
        time.sleep(INPUT_SECONDS)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), [None, 28, 28, 1])


@pytest.fixture(scope="module")
def plain_trace(tmp_path_factory):
    return traced_fit(tmp_path_factory.mktemp("plain"), jit_compile=False)


@pytest.fixture(scope="module")
def slow_trace(tmp_path_factory):
    return traced_fit(tmp_path_factory.mktemp("slow"), jit_compile=False, slow_input=True)


class TestSummarize:
    @pytest.mark.thorough
    def test_the_ten_most_expensive_ops_come_in_order_with_their_share(self, plain_trace):
        summary = trace.summarize(plain_trace)
        assert len(summary.ops) == 10
        times = [op.self_microseconds for op in summary.ops]
        assert times == sorted(times, reverse=True)
        assert all(0 < op.share < 1 for op in summary.ops)
        assert sum(op.share for op in trace.summarize(plain_trace, top=10_000).ops) == pytest.approx(1)
        assert any("conv2d" in op.name and "Conv2D" in op.type for op in summary.ops)

    def test_each_traced_step_is_seen(self, plain_trace):
        summary = trace.summarize(plain_trace)
        assert summary.steps == LAST - FIRST
        assert summary.step_seconds > 0

    @pytest.mark.thorough
    def test_a_slow_pipeline_shows_as_waiting_and_a_fast_one_does_not(self, plain_trace, slow_trace):
        slow = trace.summarize(slow_trace)
        assert slow.input_share > 0.5
        assert slow.step_seconds > 0.7 * INPUT_SECONDS
        assert trace.summarize(plain_trace).input_share < 0.7 * slow.input_share

    def test_our_own_measure_of_waiting_agrees_with_xprofs(self, slow_trace):
        # The one used where a `while` loop in the graph hides the steps from xprof.
        files = trace._newest_trace(slow_trace)
        steps = trace._marked_steps(trace._events(files[0]))
        share = sum(wait for _, wait in steps) / sum(step for step, _ in steps)
        assert len(steps) == LAST - FIRST
        assert share == pytest.approx(trace.summarize(slow_trace).input_share, abs=0.1)

    def test_steps_that_loop_inside_the_graph_are_still_seen(self, tmp_path):
        batches = iter(tf.data.Dataset.range(100).map(lambda x: delayed(tf.zeros([1, 28, 28, 1]))))

        @tf.function
        def run(count):
            total = 0.0
            for _ in tf.range(count):
                total += tf.reduce_sum(next(batches))
            return total

        run(tf.constant(1))
        with trace.trace(tmp_path):
            for number in range(3):
                with trace.step_marker(number):
                    run(tf.constant(2))
        summary = trace.summarize(tmp_path)
        assert summary.steps == 3
        assert summary.input_share > 0.5

    @pytest.mark.thorough
    def test_a_step_that_one_thread_computes_shows_its_ops_and_its_wait(self, tmp_path):
        last = FIRST + 30  # more than are fetched ahead while the first of them builds its graph
        images = np.zeros([8 * last, 28, 28, 1], np.float32)
        data = tf.data.Dataset.from_tensor_slices((images, np.zeros(len(images)))).batch(8)
        strategy = tfdist.strategy("single", devices=1)
        assert strategy.single_threaded
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        for name, batches in {"slow": data.map(lambda x, y: (delayed(x), y)), "fast": data.cache()}.items():
            strategy.fit(model, batches, callbacks=[Profile(FIRST, last, tmp_path / name)], verbose=0)
        slow, fast = trace.summarize(tmp_path / "slow"), trace.summarize(tmp_path / "fast")
        assert any("MatMul" in op.type for op in trace.summarize(tmp_path / "slow", top=100).ops)
        assert slow.input_share > 0.5
        assert fast.input_share < 0.7 * slow.input_share

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "case",
        [case if case in ("lenet", "nbow") else pytest.param(case, marks=pytest.mark.exhaustive) for case in zoo.SMALL],
    )
    def test_a_model_does_not_wait_for_data_in_memory(self, tmp_path, case):
        small = zoo.SMALL[case]
        x, y = zoo.data(case, 10 * zoo.STREAMS)
        strategy = tfdist.strategy("single", devices=1)
        with strategy.scope():
            model = models.build(zoo.name_of(case), small.spec, **small.options)
            tasks.compile(model, small.spec, "sgd")
        profile = Profile(FIRST, LAST, tmp_path)
        strategy.fit(model, x, y, batch_size=zoo.STREAMS, callbacks=[profile], verbose=0)
        found = trace.summarize(tmp_path)
        assert any("MatMul" in op.type or "Conv2D" in op.type for op in found.ops)
        assert found.input_share <= 0.02

    @pytest.mark.thorough
    def test_the_replicas_ops_are_summed_under_one_whole_name(self, tmp_path):
        strategy = tfdist.strategy("mirrored", devices=2)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, name="wide" * 10)])
            model.compile("adam", "mse")
        profile = Profile(FIRST, LAST, tmp_path)
        x = np.ones((10 * 32, 64), np.float32)
        strategy.fit(model, x, x, batch_size=32, callbacks=[profile], verbose=0)
        found = trace.summarize(tmp_path, top=10_000)
        names = [(op.name, op.type) for op in found.ops]
        assert len(set(names)) == len(names) and not any("replica_" in name for name, _ in names)
        assert sum(op.share for op in found.ops) == pytest.approx(1)
        assert found.steps == LAST - FIRST
        assert any("wide" * 10 in line for line in trace.as_text(found).splitlines())

    def test_without_markers_the_wait_is_unknown(self, tmp_path):
        multiply = tf.function(tf.linalg.matmul)
        multiply(tf.ones([300, 300]), tf.ones([300, 300]))
        with trace.trace(tmp_path):
            multiply(tf.ones([300, 300]), tf.ones([300, 300]))
        summary = trace.summarize(tmp_path)
        assert summary.input_share is None
        assert summary.steps == 0
        assert any("MatMul" in op.type for op in summary.ops)

    def test_reading_leaves_the_run_folder_as_it_was_and_the_terminal_quiet(self, plain_trace, capfd):
        before = sorted(plain_trace.rglob("*"))
        trace.summarize(plain_trace)
        assert [path.name for path in sorted(plain_trace.rglob("*")) if path not in before] == []
        assert capfd.readouterr() == ("", "")

    @pytest.mark.thorough
    def test_the_module_prints_a_table(self, plain_trace):
        answer = subprocess.run(
            [sys.executable, "-m", "tfdist.profiling.trace", str(plain_trace)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "10 most expensive ops of 4 steps" in answer.stdout
        assert "of a step waited for input" in answer.stdout
        assert all(op.name in answer.stdout for op in trace.summarize(plain_trace).ops)

    def test_the_module_has_a_help(self):
        asked = [sys.executable, "-m", "tfdist.profiling.trace", "--help"]
        assert "LOG_DIR" in subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout

    def test_a_folder_without_a_trace_is_refused(self, tmp_path):
        with pytest.raises(RunFolderError, match="No trace in") as error:
            trace.summarize(tmp_path)
        assert "--profile 10:20" in error.value.hint

    @pytest.mark.parametrize("keep", [0, 10_000])
    def test_a_truncated_trace_is_refused(self, plain_trace, tmp_path, keep):
        [whole] = plain_trace.rglob("*.xplane.pb")
        broken = tmp_path / "plugins" / "profile" / "run" / "host.xplane.pb"
        broken.parent.mkdir(parents=True)
        broken.write_bytes(whole.read_bytes()[:keep])
        with pytest.raises(RunFolderError, match="cannot be read"):
            trace.summarize(tmp_path)


def test_covered_time_is_counted_once():
    assert stages.covered([(0, 2), (1, 3), (5, 9)], 1, 6) == 3
    assert stages.covered([], 1, 6) == 0


def test_a_second_trace_in_the_process_is_refused(tmp_path):
    with trace.trace(tmp_path), pytest.raises(UsageError, match="another trace is running"):
        trace.start(tmp_path / "second")


class Server:
    """A TensorBoard process and its Profile plugin."""

    def __init__(self, process, port):
        self.process = process
        self.url = f"http://127.0.0.1:{port}/data/plugin/profile"

    def get(self, route, **parameters):
        """Status and body."""
        query = urllib.parse.urlencode(parameters)
        try:
            answer = urllib.request.urlopen(f"{self.url}/{route}?{query}", timeout=30)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            body = answer.read()
            if answer.headers["Content-Encoding"] == "gzip":  # whatever was asked for
                body = gzip.decompress(body)
            return answer.status, body.decode()

    def tool(self, run, name, **parameters):
        status, body = self.get("data", run=run, tag=name, **parameters)
        assert status == 200, f"{name}: {status} {body[:200]}"
        return json.loads(body)

    def wait_for_run(self, name, seconds=60):
        """The run's full name, once TensorBoard has found it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "TensorBoard ended"
            with contextlib.suppress(OSError, json.JSONDecodeError):
                for run in json.loads(self.get("runs")[1]):
                    if run.startswith(name):
                        return run
            time.sleep(0.2)
        raise AssertionError(f"no run {name} after {seconds} s")


@pytest.fixture(scope="module")
def tensorboard(plain_trace, tmp_path_factory):
    """Two runs: `plain`, and `compiled` by XLA, below one logdir."""
    log_dir = tmp_path_factory.mktemp("logs")
    shutil.copytree(plain_trace, log_dir / "plain")
    traced_fit(log_dir / "compiled", jit_compile=True)
    with serving(log_dir) as server:
        yield server


@contextlib.contextmanager
def serving(log_dir):
    """A TensorBoard over `log_dir`, ended with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir)]
    with open(log_dir / "tensorboard.log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Server(process, port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
class TestTensorBoard:
    @pytest.fixture(scope="class")
    def plain(self, tensorboard):
        return tensorboard.wait_for_run("plain")

    @pytest.fixture(scope="class")
    def compiled(self, tensorboard):
        return tensorboard.wait_for_run("compiled")

    @pytest.mark.thorough
    def test_the_tools_are_offered(self, tensorboard, plain, compiled):
        tools = set(json.loads(tensorboard.get("run_tools", run=plain)[1]))
        names = {tool.rstrip("@^") for tool in tools}
        assert names >= {
            "overview_page",
            "trace_viewer",
            "framework_op_stats",
            "op_profile",
            "memory_profile",
            "input_pipeline_analyzer",
        }
        assert "memory_viewer" in json.loads(tensorboard.get("run_tools", run=compiled)[1])

    @pytest.mark.thorough
    def test_overview_page_has_the_traced_steps(self, tensorboard, plain):
        tables = tensorboard.tool(plain, "overview_page")
        steps = next(t for t in tables if "stepTimeMs" in [column["id"] for column in t["cols"]])
        assert [row["c"][0]["v"] for row in steps["rows"]] == [f"train {n}" for n in range(FIRST, LAST)]
        assert float(steps["p"]["steptime_ms_average"]) > 0

    def test_trace_viewer_has_the_step_markers(self, tensorboard, plain):
        events = tensorboard.tool(plain, "trace_viewer@")["traceEvents"]
        markers = {event["name"] for event in events if re.fullmatch(r"train \d+", event.get("name", ""))}
        assert markers == {f"train {number}" for number in range(FIRST, LAST)}

    def test_framework_op_stats_have_the_convolution(self, tensorboard, plain):
        rows = tensorboard.tool(plain, "framework_op_stats")[0]["rows"]
        assert any("conv2d" in row["c"][3]["v"] for row in rows)

    def test_input_pipeline_has_the_datasets_stages(self, tensorboard, plain):
        tables = tensorboard.tool(plain, "input_pipeline_analyzer")
        stages = next(t for t in tables if "opName" in [column["id"] for column in t["cols"]])
        assert any("BatchV2" in row["c"][0]["v"] for row in stages["rows"])

    def test_memory_profile_has_an_allocators_timeline(self, tensorboard, plain):
        [host] = [host["hostname"] for host in json.loads(tensorboard.get("hosts", run=plain, tag="memory_profile")[1])]
        profile = tensorboard.tool(plain, "memory_profile", host=host)
        allocators = profile["memoryProfilePerAllocator"]
        assert any(int(a["profileSummary"]["peakBytesUsageLifetime"]) > 0 for a in allocators.values())

    def test_memory_viewer_has_the_buffers_of_a_step_compiled_by_xla(self, tensorboard, compiled):
        status, modules = tensorboard.get("module_list", run=compiled)
        assert status == 200
        module = next(name for name in modules.split(",") if "one_step" in name)
        viewer = tensorboard.tool(compiled, "memory_viewer", module_name=module)
        assert viewer["totalBufferAllocationMib"] > 0

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("run", ["plain", "compiled"])
    def test_op_profile_answers(self, tensorboard, run, request):
        # Its tree is filled from a GPU's or TPU's own timeline: on a CPU it is there, and empty.
        profile = tensorboard.tool(request.getfixturevalue(run), "op_profile", group_by="program")
        assert profile["byProgram"]["name"] == "by_program"
        assert profile["deviceType"]
        if profile["deviceType"] != "CPU_ONLY":
            assert profile["byProgram"]["children"]
