"""A job across two hosts: network namespaces with an address each, joined by a link that can be slowed and cut."""

import contextlib
import importlib.metadata
import time

import numpy as np
import psutil
import pytest

from tests.processes.hosts import ADDRESSES, NAMES, Hosts
from tests.processes.jobs import epochs_done, record, require_horovod, start_by_hand, train, wait_for_epochs, weights
from tfdist.groups import horovod

pytestmark = pytest.mark.thorough

FIRST_PORT = 2222
TIMEOUT_SECONDS = 15
# A worker on each host; a role's list has the host of each of its processes.
WORKERS = {"worker": [0, 1]}
SERVED = {"chief": [0], "worker": [0, 1], "ps": [0]}


class Cluster(Hosts):
    """Two hosts, and the processes of a job that runs across them."""

    def __init__(self):
        super().__init__()
        self.processes = []

    def close(self):
        for process in self.processes:
            process.kill()
            process.communicate()
        super().close()

    def start(self, roles, run_dir, *options, strategy="multiworker", called=ADDRESSES):
        """Starts the processes of a job, each with its TF_CONFIG on its host, and returns them in the order of `roles`.

        Args:
            roles: the host of each process by its role, as `WORKERS`.
            called: how TF_CONFIG calls the hosts.
        """
        places = [(role, index, host) for role, hosts in roles.items() for index, host in enumerate(hosts)]
        cluster = {role: [] for role in roles}
        for position, (role, _, host) in enumerate(places):
            cluster[role].append(f"{called[host]}:{FIRST_PORT + position}")
        options = ("--timeout-seconds", TIMEOUT_SECONDS, *options)
        started = [
            start_by_hand(
                run_dir,
                {"cluster": cluster, "task": {"type": role, "index": index}},
                *options,
                strategy=strategy,
                inside=self.inside(host),
            )
            for role, index, host in places
        ]
        self.processes += started
        return started


def end(processes, seconds):
    """Waits for all, `seconds` together, and returns the exit code and the errors of each."""
    until = time.monotonic() + seconds
    errors = [process.communicate(timeout=max(0.0, until - time.monotonic()))[1] for process in processes]
    return list(zip([process.returncode for process in processes], errors, strict=True))


def epochs_of_both(run_dir):
    """How many epochs both ranks have trained, which end the last one with the same metrics."""
    found = record(run_dir)
    assert [process["differing_metrics"] for process in found["processes"]] == [None, None]
    return len(found["epochs"])


@pytest.fixture
def hosts():
    with contextlib.closing(Cluster()) as cluster:
        cluster.open()
        yield cluster


@pytest.fixture(scope="module")
def weights_on_one_host(tmp_path_factory):
    """Of as many processes: each drops units of its own, so that one process alone would train another model."""
    run_dir = tmp_path_factory.mktemp("one-host") / "run"
    with train("--epochs", "2", run_dir=run_dir) as job:
        code, _, err = job.end()
    assert code == 0, err
    return weights(run_dir)


@pytest.mark.parametrize(
    "slowed", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["free link", "link of 1 Gbit/s"]
)
def test_a_job_across_two_hosts_equals_one_on_one_host(hosts, tmp_path, weights_on_one_host, slowed):
    if slowed:
        hosts.slow_down()
    run_dir = tmp_path / "run"
    ended = end(hosts.start(WORKERS, run_dir, "--epochs", 2), seconds=120)
    assert [code for code, _ in ended] == [0, 0], ended
    assert epochs_of_both(run_dir) == 2
    for found, wanted in zip(weights(run_dir), weights_on_one_host, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=5e-5, atol=5e-5)


@pytest.mark.exhaustive
def test_a_job_outlives_a_link_that_is_cut_for_a_while(hosts, tmp_path):
    """A cut of 5 s, shorter than the timeout: TCP sends again what was lost, and the job goes on to its end."""
    epochs = 12
    run_dir = tmp_path / "run"
    processes = hosts.start(WORKERS, run_dir, "--epochs", epochs)
    wait_for_epochs(run_dir, 2, processes)
    hosts.cut()
    time.sleep(5)
    assert epochs_done(run_dir) < epochs, "the job was not cut in its middle"
    hosts.mend()
    ended = end(processes, seconds=60)
    assert [code for code, _ in ended] == [0, 0], ended
    assert epochs_of_both(run_dir) == epochs


def test_both_name_the_other_when_the_link_is_cut_for_good(hosts, tmp_path):
    run_dir = tmp_path / "run"
    processes = hosts.start(WORKERS, run_dir, "--epochs", 2000)
    wait_for_epochs(run_dir, 2, processes)
    # Each collective operation with a timeout of TensorFlow's own would hold a thread until it has passed.
    assert all(psutil.Process(process.pid).num_threads() < 500 for process in processes)
    hosts.cut()
    ended = end(processes, seconds=TIMEOUT_SECONDS + 20)
    assert [code for code, _ in ended] == [3, 3], ended
    for rank, (_, err) in enumerate(ended):
        other = 1 - rank
        assert f"Gone, or silent for {TIMEOUT_SECONDS} s: worker {other} ({ADDRESSES[other]}:" in err
        assert "Traceback" not in err


@pytest.mark.parametrize("called", [ADDRESSES, NAMES], ids=["addresses", "names"])
@pytest.mark.parametrize("strategy", ["multiworker", "horovod", "local_sgd"])
def test_every_engine_connects_hosts_whose_own_names_are_loopback_addresses(hosts, tmp_path, strategy, called):
    if strategy == "horovod":
        require_horovod()
        if horovod.PATCHED not in importlib.metadata.version("horovod"):
            pytest.skip("Horovod is not patched for such hosts: run `make horovod`")
    ended = end(hosts.start(WORKERS, tmp_path / "run", "--epochs", 1, strategy=strategy, called=called), seconds=120)
    assert [code for code, _ in ended] == [0, 0], ended
    assert epochs_of_both(tmp_path / "run") == 1


def test_without_the_patch_of_horovod_both_refuse_such_hosts_at_once(hosts, tmp_path):
    require_horovod()
    if horovod.PATCHED in importlib.metadata.version("horovod"):
        pytest.skip("Horovod is patched")
    ended = end(hosts.start(WORKERS, tmp_path / "run", strategy="horovod"), seconds=60)
    assert [code for code, _ in ended] == [2, 2], ended
    for _, err in ended:
        for rank, name in enumerate(NAMES):
            assert f"the host of worker {rank} ({ADDRESSES[rank]}:" in err
            assert f"calls itself `{name}`, which is `127.0.1.1` there" in err


class TestParameterServer:
    """A chief, a worker and the server on one host, another worker on the other."""

    @pytest.mark.exhaustive
    def test_a_job_across_two_hosts_trains(self, hosts, tmp_path):
        hosts.slow_down()
        processes = hosts.start(SERVED, tmp_path / "run", "--epochs", 3, strategy="parameter_server")
        ended = end(processes, seconds=120)
        assert [code for code, _ in ended] == [0] * 4, ended
        assert len(record(tmp_path / "run")["epochs"]) == 3

    @pytest.mark.exhaustive
    def test_it_goes_on_without_a_worker_that_is_cut_off_for_a_while(self, hosts, tmp_path):
        run_dir = tmp_path / "run"
        processes = hosts.start(SERVED, run_dir, "--epochs", 60, strategy="parameter_server")
        wait_for_epochs(run_dir, 2, processes)
        hosts.cut()
        time.sleep(5)
        hosts.mend()
        ended = end(processes, seconds=TIMEOUT_SECONDS + 120)
        assert [code for code, _ in ended] == [0] * 4, ended
        assert len(record(run_dir)["epochs"]) == 60
