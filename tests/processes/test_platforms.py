"""Jobs as the platforms start them: two hosts with the names and the variables that each of them gives."""

import contextlib
import json
import subprocess
import sys

import pytest

from tests.manifests import documents, pods_of_tfjob, pods_of_trainjob
from tests.processes.hosts import Hosts
from tests.processes.jobs import ROOT, clean_environment, record
from tests.test_world import sagemaker, vertex
from tfdist.launcher import emit
from tfdist.launcher.job import Job

pytestmark = pytest.mark.thorough

PROGRAM = ("-m", "tfdist.train", "--strategy", "multiworker", "--model", "mlp", "--dataset", "digits", "--epochs", "2")
VERTEX = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222"],
}
ALGORITHMS = ["algo-1", "algo-2"]


def of_pods(target, pods, run_dir):
    """The host name, the command and the variables of each pod of an emitted job."""
    job = Job((*PROGRAM, "--run-dir", str(run_dir)), workers=2, name="demo")
    known = documents(emit.TARGETS[target](job))
    if target == "tfjob":  # as docs/kubeflow.md adds an evaluator
        replicas = known["TFJob"]["spec"]["tfReplicaSpecs"]
        replicas["Evaluator"] = replicas["Worker"] | {"replicas": 1}
    return list(pods(known))


def of_containers(variables, run_dir):
    """The same for a platform that starts the user's command with variables."""
    command = ["python", *PROGRAM, "--run-dir", str(run_dir)]
    return [(host, command, given) for host, given in variables.items()]


PLATFORMS = {
    "TrainJob": lambda run_dir: of_pods("trainjob", pods_of_trainjob, run_dir),
    "TFJob": lambda run_dir: of_pods("tfjob", pods_of_tfjob, run_dir),
    "SageMaker": lambda run_dir: of_containers(
        {host: sagemaker(json.dumps(ALGORITHMS), host) | {"SM_NUM_GPUS": "0"} for host in ALGORITHMS}, run_dir
    ),
    "Vertex AI": lambda run_dir: of_containers(
        {addresses[0].partition(":")[0]: vertex(VERTEX, pool) for pool, addresses in VERTEX.items()}, run_dir
    ),
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_job_trains_on_hosts_that_call_each_other_as_the_platform_names_them(platform, tmp_path):
    places = PLATFORMS[platform](tmp_path / "run")
    hosts = Hosts(called=[host for host, _, _ in places[:2]])
    with contextlib.closing(hosts), contextlib.ExitStack() as running:
        hosts.open()
        started = []
        for index, (_, command, variables) in enumerate(places):
            # `python` is that of the tests, and the processes find this tfdist.
            environment = clean_environment() | variables
            environment["PATH"] = f"{sys.exec_prefix}/bin:{environment['PATH']}"
            process = subprocess.Popen(
                [*hosts.inside(index % 2), *command],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            running.callback(process.communicate)
            running.callback(process.kill)
            started.append(process)
        outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(places), outputs
    written = record(tmp_path / "run")
    evaluated = tmp_path / "run" / "evaluator-0" / "history.csv"
    assert (len(evaluated.read_text().splitlines()) == 3) if platform == "TFJob" else not evaluated.exists()
    assert (written["status"], written["world"]["world_size"], len(written["epochs"])) == ("completed", 2, 2)
    assert written["test_metrics"]["accuracy"] > 0.5
