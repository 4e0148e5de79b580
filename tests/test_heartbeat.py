"""Who is silent, who is busy, and who cannot be asked at all; here threads take the part of processes."""

import contextlib
import json
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist import terminal
from tfdist.cluster import heartbeat
from tfdist.cluster.heartbeat import Heartbeat, Limits
from tfdist.cluster.world import World

SECONDS = 0.4
WAITS, BUSY = (2, 1), (1, 1)


class Job:
    """Two processes of two machines that meet, and what becomes of them."""

    def __init__(self, *counts, **limits):
        self.counts = list(counts)
        self.limits = Limits(SECONDS, **limits)
        self.errors = [None, None]
        self.barrier = threading.Barrier(2)
        self.said = [b"", b""]
        with ThreadPoolExecutor(2) as pool:
            self.both = list(pool.map(self._start, range(2)))

    def _start(self, rank):
        def exchange(message):
            self.said[rank] = message
            self.barrier.wait(10)
            return list(self.said)

        def give_up(error):
            self.errors[rank] = error

        world = World(rank, 2, 0, 1, "mpirun of Open MPI")
        return Heartbeat(world, exchange, lambda: self.counts[rank], self.limits, give_up)

    def close(self):
        for one in self.both:
            one._state.close()
            one._listener.close()

    def work(self, seconds):
        """All are at work for so long."""
        with self.both[0].work(), self.both[1].work():
            time.sleep(seconds)

    def sentences(self):
        return [error and error.sentence for error in self.errors]


@pytest.fixture
def start():
    """Starts jobs, which end with the test."""
    with contextlib.ExitStack() as jobs:
        yield lambda *counts, **limits: jobs.enter_context(contextlib.closing(Job(*counts, **limits)))


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """The lines that were shown to the user."""
    lines = []
    monkeypatch.setattr(terminal, "say", lines.append)
    return lines


def test_the_name_of_a_machine_need_not_be_known_elsewhere(monkeypatch, start):
    monkeypatch.setattr(socket, "gethostname", lambda: "this-machine-alone-knows.invalid")
    if heartbeat._hosts(World())[1:] == []:
        pytest.skip("this machine has no address that others could know")
    with warnings.catch_warnings(action="error"):
        job = start(BUSY, BUSY)
    job.work(3 * SECONDS)
    assert [one.silent() for one in job.both] == [[], []]
    assert job.errors == [None, None]


def test_one_that_cannot_be_connected_with_is_told_with_the_reason_and_is_not_given_up(monkeypatch, start):
    monkeypatch.setattr(heartbeat, "_hosts", lambda world: ["nowhere.invalid"])
    told = r"rank 0 cannot connect to the heartbeat of rank 1 \(nowhere.invalid: .*\). The job continues"
    with pytest.warns(RuntimeWarning, match=told):
        job = start(WAITS, WAITS)
    assert [list(one.unreachable) for one in job.both] == [[1], [0]]
    job.work((heartbeat.ALL_WAIT + 3) * SECONDS)
    assert job.errors == [None, None]


def test_another_machine_with_the_address_is_not_taken_for_the_process(monkeypatch, start):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    with connection:
                        connection.sendall(json.dumps(["another", False, 0.0]).encode())

        threading.Thread(target=answer, daemon=True).start()
        endpoint = heartbeat._endpoint
        monkeypatch.setattr(heartbeat, "_hosts", lambda world: ["127.0.0.1"])
        monkeypatch.setattr(
            heartbeat, "_endpoint", lambda name, host, port: endpoint(name, host, other.getsockname()[1])
        )
        with pytest.warns(RuntimeWarning, match="127.0.0.1: another process answers"):
            start(BUSY, BUSY)


def test_ipv6_alone_is_enough(monkeypatch, start):
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(heartbeat, "_hosts", lambda world: ["::1"])
    with warnings.catch_warnings(action="error"):
        job = start(BUSY, BUSY)
    job.work(3 * SECONDS)
    assert job.errors == [None, None]


def test_one_that_falls_silent_is_given_up_in_time_and_by_its_name(start):
    job = start(WAITS, BUSY)
    job.both[1]._listener.shutdown(socket.SHUT_RDWR)  # which ends what answers
    job.both[1]._listener.close()
    began = time.monotonic()
    while job.errors[0] is None and time.monotonic() - began < 10:
        time.sleep(0.01)
    assert 0.9 * SECONDS < time.monotonic() - began < 4 * SECONDS
    assert job.sentences()[0] == "Gone, or silent for 0.4 s: rank 1"


def test_one_that_is_busy_is_waited_for_and_that_is_said_once(start, said):
    job = start(WAITS, BUSY)
    job.work(8 * SECONDS)
    assert job.errors == [None, None]
    assert len(said) == 1
    assert said[0].startswith("Waiting for rank 1: alive, and busy for 0 s so far, for example in a callback")
    assert [one.others_are_busy() for one in job.both] == [True, False]


def test_the_chief_says_that_others_wait_for_it(start, said):
    start(BUSY, WAITS).work(4 * SECONDS)
    assert [line.partition(":")[0] for line in said] == ["Waiting for rank 0"]


def test_how_long_one_may_be_busy_can_be_bounded(start):
    job = start(WAITS, BUSY, busy_seconds=4 * SECONDS)
    job.work(3 * SECONDS)
    assert job.errors == [None, None]
    job.work(4 * SECONDS)
    sentence = "Busy for longer than 1.6 s (`callback_timeout_seconds`) while others waited: rank 1"
    assert job.sentences() == [sentence, None]


def test_nothing_is_said_of_those_that_nobody_waits_for(start, said):
    job = start(BUSY, BUSY, busy_seconds=SECONDS)
    job.work(5 * SECONDS)
    assert said == [] and job.errors == [None, None]


def test_where_all_wait_for_each_other_the_job_is_given_up(start):
    job = start(WAITS, WAITS)
    job.work((heartbeat.ALL_WAIT + 3) * SECONDS)
    assert all("have waited for each other" in sentence for sentence in job.sentences())
