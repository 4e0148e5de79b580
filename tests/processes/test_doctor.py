"""The doctor's all-reduce between two real processes, and what it says where they cannot add up."""

import json
import subprocess
import sys

import pytest

from tests.processes.jobs import ROOT, clean_environment, require_horovod
from tfdist.doctor import links

pytestmark = pytest.mark.thorough

CODE = """
import dataclasses, json, sys
from tfdist.doctor import links, readiness
tried = links.between_two_processes(sys.argv[1])
found = list(links.findings([tried]))
print(json.dumps([dataclasses.asdict(one) for one in (tried, *found, readiness.of(sys.argv[1], [tried]))]))
"""


def run(folder, *command, **variables):
    return subprocess.run(
        [sys.executable, *command],
        env=clean_environment() | {"PYTHONPATH": str(ROOT), "TFDS_DATA_DIR": str(folder)} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def between_two(folder, strategy, **variables):
    done = run(folder, "-c", CODE, strategy, **variables)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []  # no logs are left
    return json.loads(done.stdout.splitlines()[-1])


def check(link):
    assert 1 < link["latency_microseconds"] < 1e6 and 1e-3 < link["gigabytes_per_second"] < 1e3


def test_two_processes_add_up_and_are_timed(tmp_path):
    tried, found, ready = between_two(tmp_path, "multiworker")
    check(tried["link"])
    assert found["state"] == "ok" and "Two processes all-reduce 4 bytes over sockets in" in found["sentence"]
    assert ready == {"strategy": "multiworker", "ready": True, "reason": "", "command": ""}


def test_processes_that_cannot_add_up_are_a_problem_and_their_strategy_is_not_ready(tmp_path):
    require_horovod()
    tried, found, ready = between_two(tmp_path, "horovod", HOROVOD_GLOO_IFACE="no-such-interface")
    assert tried["link"] is None and found["state"] == "problem"
    assert found["sentence"].startswith(
        "Two processes of `horovod` could not all-reduce over Gloo: their launcher ended with exit code 2: "
        "`HOROVOD_GLOO_IFACE` is `no-such-interface`, and this machine has the network interfaces"
    )
    assert found["hint"] == "name one of these, or unset it"
    assert (ready["ready"], ready["reason"], ready["command"]) == (False, found["sentence"], found["hint"])


@pytest.mark.exhaustive  # TensorFlow's servers wait for a minute
def test_a_proxy_between_tensorflows_servers_keeps_them_apart_as_the_doctor_says(tmp_path):
    tried, _, ready = between_two(tmp_path, "multiworker", https_proxy="http://127.0.0.1:9")
    assert tried["error"].endswith("DeadlineExceededError: Deadline Exceeded")
    assert ready["command"] == "export no_proxy=localhost"
    tried, _, ready = between_two(tmp_path, "multiworker", https_proxy="http://127.0.0.1:9", no_proxy="localhost")
    assert tried["link"] and ready["ready"]


@pytest.mark.exhaustive  # its parts are tested one by one
def test_all_is_ready_where_all_is_installed_and_each_engine_is_timed(tmp_path):
    require_horovod()
    done = run(tmp_path, "-m", "tfdist.doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert [one["strategy"] for one in found["strategies"] if not one["ready"]] == []
    assert [one["engine"] for one in found["all_reduce"]] == [engine for engine, _ in links.ENGINES.values()]
    for one in found["all_reduce"]:
        check(one)
