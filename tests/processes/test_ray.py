"""Training in Ray Train's workers, and the launcher on a Ray cluster: a real cluster of two cores on this machine."""

import contextlib
import csv
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.processes.jobs import ROOT, RunningJob, clean_environment, free_ports, require_horovod

pytest.importorskip("ray", reason="Ray is not installed: `pip install 'ray[train,tune]'`")

PROGRAM = Path(__file__).with_name("ray_jobs.py")
START_SECONDS, RUN_SECONDS = 120, 400
SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how often Ray Train takes reports
    "PYTHONPATH": str(ROOT),
    "TF_CPP_MIN_LOG_LEVEL": "1",
}
SAY = """
import os, sys
from tfdist.world import World
world = World.detect()
print("rank", world.rank, "of", world.world_size, len(os.sched_getaffinity(0)), sys.argv[1:], flush=True)
"""
FAIL = """
import sys, time
from tfdist.world import World
if World.detect().rank == 1:
    sys.exit("the disk is full")
time.sleep(100)
"""
FAIL_ONCE = """
import os, sys
print("start", os.environ["TFDIST_RESTART"], flush=True)
sys.exit(0 if os.environ["TFDIST_RESTART"] == "1" else 9)
"""
LATE = """
    import glob, time
    for _ in range(600):
        if name != "tuner1" or glob.glob(f"{FOLDER}/**/trial_*", recursive=True):
            break
        time.sleep(0.1)
"""
WAIT = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(100)\n"


class Node:
    """A node of a Ray cluster, with its processes: the first one, or another at the address of the first.

    Args:
        cores: the number of its CPUs for Ray.
        address: the address of the first node; `None` for the first node.
    """

    def __init__(self, cores, address=None):
        self.address = address
        # A socket's path is short, and pytest's folders are not.
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        where = [f"--address={address}"]
        if address is None:
            where = ["--head", "--port=0", f"--ray-client-server-port={free_ports(1)[0]}", "--include-dashboard=false"]
            where.append(f"--temp-dir={self._folder.name}")
        self._log = open(Path(self._folder.name, "log"), "w+", encoding="utf-8")  # noqa: SIM115
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", *where, f"--num-cpus={cores}", "--block"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=clean_environment() | SETTINGS,
        )

    def started(self):
        until = time.monotonic() + START_SECONDS
        while "Ray runtime started" not in (text := self._text()):
            assert time.monotonic() < until and self.process.poll() is None, text
            time.sleep(0.1)
        if self.address is None:
            self.address = re.search(r"--address='([^']+)'", text)[1]
        return self

    def end(self):
        """Ends the processes of the node at once: `ray start` takes long to end them."""
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        self._log.close()
        self._folder.cleanup()

    def _text(self):
        self._log.seek(0)
        return self._log.read()


@pytest.fixture(scope="module")
def head():
    node = Node(3)
    try:
        yield node.started()
    finally:
        node.end()


@pytest.fixture
def add_node():
    """Starts a node, which ends with the test."""
    with contextlib.ExitStack() as stack:

        def add(address=None):
            node = Node(1, address)
            stack.callback(node.end)
            return node

        yield add


@pytest.fixture
def environment(head):
    return SETTINGS | {"RAY_ADDRESS": head.address}


def run(name, folder, environment, *arguments):
    """Runs one of the programs; its exit code and output."""
    return run_program([PROGRAM, name, folder, *map(str, arguments)], folder, environment)


def run_program(command, folder, environment):
    """Runs a program of Python's in a folder; its exit code and output."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def workers_that_say(phrase, text):
    """The process ids of Ray's workers with `phrase` in a line of their output, which Ray shows twice."""
    return set(re.findall(rf"\(RayTrainWorker pid=(\d+)[^)]*\).*{re.escape(phrase)}", text))


def weights(folder, rank=0):
    with np.load(folder / f"rank-{rank}.npz") as saved:
        return [saved[name] for name in saved.files]


def assert_equal(these, others, tolerance=5e-6):
    for one, other in zip(these, others, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    code, text = run("one_device", folder, SETTINGS)
    assert code == 0, text
    return weights(folder)


def test_a_killed_worker_is_replaced_and_the_training_ends_with_the_weights_of_one_device(
    tmp_path, environment, of_one_device
):
    code, text = run("killed", tmp_path, environment, 1, 14)
    assert code == 0, text
    assert (tmp_path / "killed").exists()
    assert len(workers_that_say("workers 2 checkpoint False", text)) == 2
    assert len(workers_that_say("workers 2 checkpoint True", text)) == 2
    assert "metrics ['accuracy', 'epoch', 'loss'] checkpoint True" in text
    for rank in range(2):
        assert_equal(weights(tmp_path, rank), of_one_device)


@pytest.mark.thorough
@pytest.mark.independent
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_is_killed_at_a_random_step_changes_no_weight(tmp_path, environment, of_one_device, seed):
    random = np.random.default_rng([seed, 47])
    code, text = run("killed", tmp_path, environment, random.integers(2), random.integers(1, 30))
    assert code == 0, text
    assert (tmp_path / "killed").exists()
    assert_equal(weights(tmp_path), of_one_device)


@pytest.mark.thorough
@pytest.mark.independent
def test_a_training_under_the_same_name_continues_the_earlier_one(tmp_path, environment, of_one_device):
    code, text = run("continued", tmp_path, environment)
    assert code == 0, text
    assert len(workers_that_say("workers 2 checkpoint True", text)) == 2
    assert_equal(weights(tmp_path), of_one_device)


@pytest.mark.thorough
@pytest.mark.independent
@pytest.mark.parametrize("strategy", ["horovod", "local_sgd", "gossip"])
def test_other_strategies_train_in_rays_workers(tmp_path, environment, strategy):
    if strategy == "horovod":
        require_horovod()
    code, text = run("with_strategy", tmp_path, environment, strategy)
    assert code == 0, text
    assert len(workers_that_say("workers 2 checkpoint False", text)) == 2


@pytest.mark.thorough
@pytest.mark.independent
def test_workers_with_different_data_are_refused(tmp_path, environment):
    code, text = run("unequal", tmp_path, environment)
    assert code == 1
    assert "The processes of the job were given different arrays" in text
    assert "pass `tfdist.data.per_process(data)`" in text


@pytest.mark.thorough
@pytest.mark.independent
def test_a_report_refuses_a_second_fit_and_one_without_a_strategy_and_takes_metrics_that_are_arrays(
    tmp_path, environment
):
    code, text = run("phases", tmp_path, environment)
    assert code == 0, text
    assert len(workers_that_say("refused: `tfdist.ray.Report` is used a second time", text)) == 2
    assert len(workers_that_say("refused: `fit` runs without a strategy", text)) == 2
    assert "values of the metric 10\n" in text


@pytest.mark.thorough
@pytest.mark.independent
def test_a_report_in_a_function_of_ray_tune_is_refused_in_a_sentence(tmp_path, environment):
    _, text = run("report_in_tune", tmp_path, environment)
    assert "`tfdist.ray.Report` was made outside of a training function of Ray Train" in text


@pytest.mark.thorough
@pytest.mark.independent
def test_shards_of_ray_data_form_global_batches(tmp_path, environment):
    code, text = run("ray_data", tmp_path, environment)
    assert code == 0, text
    assert len(workers_that_say("steps 10", text)) == 2
    assert_equal(weights(tmp_path, 0), weights(tmp_path, 1), 0)


@pytest.mark.thorough
@pytest.mark.independent
def test_ray_tune_finds_the_better_of_two_trainings(tmp_path, environment):
    code, text = run("tuned", tmp_path, environment)
    assert code == 0, text
    assert "best {'rate': 0.05}" in text


@pytest.mark.thorough
@pytest.mark.independent
def test_kerastuner_trains_trials_at_the_same_time(tmp_path, environment):
    pytest.importorskip("keras_tuner", reason="KerasTuner is not installed")
    page = (ROOT / "docs" / "trackers_and_tuners.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n((?:(?!```).)*^import keras_tuner\n.*?)```", page, re.DOTALL | re.MULTILINE)
    # The second tuner is late, as on a busy machine: the first one trains when it starts.
    late = program.replace("    strategy = tfdist", LATE + "    strategy = tfdist")
    assert late != program
    (tmp_path / "program.py").write_text(late.replace(":8000", f":{free_ports(1)[0]}"), encoding="utf-8")
    code, text = run_program(["program.py"], tmp_path, environment)
    assert code == 0, text
    trials = re.findall(r"^\((?:np\.float64\()?([\d.]+)\)?, {'units': (\d+)}\)$", text, re.MULTILINE)
    assert len({units for _, units in trials}) == 4
    assert max(float(score) for score, _ in trials) > 0.3


@pytest.mark.thorough
@pytest.mark.independent
def test_workers_that_are_added_by_ray_change_no_weight(tmp_path, of_one_device, add_node):
    """Ray starts with one worker, and with two as soon as the cluster has a second node."""
    first = add_node().started()
    program = subprocess.Popen(
        [sys.executable, PROGRAM, "elastic", tmp_path],
        env=clean_environment() | SETTINGS | {"RAY_ADDRESS": first.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen, second = [], None
    try:
        for line in program.stdout:
            seen.append(line)
            if second is None and "workers 1 checkpoint False" in line:
                second = add_node(first.address)
        text = "".join(seen)
        assert program.wait() == 0, text
    finally:
        program.kill()
    assert len(workers_that_say("workers 2 checkpoint True", text)) == 2
    assert_equal(weights(tmp_path), of_one_device)


def launch(tmp_path, environment, *arguments):
    return RunningJob("--on", "ray", *arguments, cwd=tmp_path, environment=environment)


def test_the_launcher_starts_its_processes_on_the_cluster(tmp_path, script, environment):
    with launch(tmp_path, environment, "--verbose", script(SAY), "a b") as job:
        code, out, err = job.end()
    assert code == 0, err
    assert "anyone who can reach these ports can run code as you" in err
    cores = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert f"\nrank 0 of 2 {cores} ['a b']\n" in "\n" + out
    assert f"[worker 1] rank 1 of 2 {cores} ['a b']\n" in out
    assert sorted(path.stem for path in (tmp_path / "logs").glob("*/*.log")) == ["worker-0", "worker-1"]


def test_a_process_that_fails_on_the_cluster_ends_the_job_with_its_message_and_code(tmp_path, script, environment):
    with launch(tmp_path, environment, script(FAIL)) as job:
        code, out, err = job.end()
    assert code == 1
    assert "worker 1" in out + err
    assert "the disk is full" in out + err


def test_a_job_on_the_cluster_is_started_again(tmp_path, script, environment):
    with launch(tmp_path, environment, "--restarts", "1", script(FAIL_ONCE)) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    assert "start 0" in out
    assert "start 1" in out


def processes_of(job, *nodes):
    """The two processes of a job on these nodes of the cluster, as soon as they have started."""

    def find():
        below = [p for node in nodes for p in psutil.Process(node.process.pid).children(recursive=True)]
        started = []
        for process in below:
            with contextlib.suppress(psutil.Error):
                started += [process] * ("tfdist.launcher.script" in process.cmdline())
        return started if len(started) == 2 else None

    return job.wait_for(find)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_on_the_cluster_when_the_launcher_ends(tmp_path, script, head, environment, number):
    with launch(tmp_path, environment, script(WAIT)) as job:
        processes = processes_of(job, head)
        job.launcher.send_signal(number)
        code, _, _ = job.end(60)
        assert code == (130 if number == signal.SIGINT else -number)
        _, alive = psutil.wait_procs(processes, 30)
        assert alive == []


@pytest.mark.thorough
@pytest.mark.independent
def test_a_node_that_is_lost_ends_the_job_by_name(tmp_path, script, add_node):
    first = add_node().started()
    second = add_node(first.address).started()
    with launch(tmp_path, SETTINGS | {"RAY_ADDRESS": first.address}, script(WAIT)) as job:
        processes = processes_of(job, first, second)
        second.end()
        code, out, err = job.end(90)
        assert code == 3, out + err
        assert re.search(r"worker [01] ended with exit code 3", out + err)
        assert "is lost" in out + err
        assert psutil.wait_procs(processes, 30)[1] == []


def test_a_job_without_room_says_what_it_needs(tmp_path, script, environment):
    with launch(tmp_path, environment, "--workers", "4", "--start-seconds", "2", script(WAIT)) as job:
        code, out, err = job.end(60)
    assert code == 3
    message = " ".join((out + err).split())
    assert "no room for the 4 processes of the job within 2 s (needed: 4 CPUs; free: 3 CPUs)" in message


def test_an_address_without_a_cluster_is_named(tmp_path, script):
    settings = SETTINGS | {"RAY_ADDRESS": "127.0.0.1:1"}
    with launch(tmp_path, settings, script(WAIT)) as job:
        code, out, err = job.end(120)
    assert code == 3
    assert "`RAY_ADDRESS` is `127.0.0.1:1`" in out + err
    assert "Traceback" not in out + err


@pytest.mark.thorough
@pytest.mark.independent
def test_the_command_trains_on_the_cluster_as_on_this_machine(tmp_path, environment):
    options = ["--strategy", "multiworker", "--model", "mlp", "--dataset", "digits", "--workers", 2, "--epochs", 1]
    histories = []
    for name, more in (("here", []), ("ray", ["--on", "ray"])):
        with RunningJob(
            *options, "--run-dir", name, *more, cwd=tmp_path, module="tfdist.train", environment=environment
        ) as job:
            code, out, err = job.end()
        assert code == 0, out + err
        with (tmp_path / name / "history.csv").open(encoding="utf-8", newline="") as file:
            histories.append([float(row["loss"]) for row in csv.DictReader(file)])
    np.testing.assert_allclose(*histories, rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.independent
def test_without_a_cluster_there_is_one_for_the_job(tmp_path, script):
    with launch(tmp_path, {"RAY_AUTH_TOKEN": SETTINGS["RAY_AUTH_TOKEN"]}, script(SAY)) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    assert "rank 0 of 2" in out
