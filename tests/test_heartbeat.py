"""Who is silent, who is busy, and who cannot be asked at all; here threads take the part of processes."""

import contextlib
import json
import re
import selectors
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist import terminal
from tfdist.jobs import heartbeat
from tfdist.jobs.connections import LineConnection, Loss, Member, as_line
from tfdist.jobs.heartbeat import Heartbeat, Limits
from tfdist.jobs.heartbeat_tree import SOME, Activity, Losses, Summary, Tree
from tfdist.jobs.tree import FAN_OUT
from tfdist.jobs.world import World

# The end of a thread stands for that of a process.
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*SystemExit:pytest.PytestUnhandledThreadExceptionWarning")
SECONDS = 0.4
WAITS, BUSY = (2, 1), (1, 1)


class Job:
    """Processes of as many machines that meet, and what becomes of them.

    Args:
        counts: what each process has begun and ended.
        seconds: how long one may be silent.
        activities: what each process says of its work.
        limits: other limits.
    """

    def __init__(self, *counts, seconds=SECONDS, activities=(), **limits):
        self.activities = activities or [Activity()] * len(counts)
        size = len(counts)
        self.counts = list(counts)
        self.limits = Limits(seconds, **limits)
        self.errors = [None] * size
        self.paused = [threading.Event() for _ in range(size)]
        self.killed = set()
        self.barrier = threading.Barrier(size)
        self.said = [b""] * size
        with ThreadPoolExecutor(size) as pool:
            self.all = list(pool.map(self._start, range(size)))

    def _start(self, rank):
        def exchange(message):
            self.said[rank] = message
            self.barrier.wait(10)
            return list(self.said)

        def counts():
            while self.paused[rank].is_set() and rank not in self.killed:
                time.sleep(0.01)
            if rank in self.killed:
                raise SystemExit  # which ends the thread, and closes its sockets
            return self.counts[rank]

        def give_up(error):
            self.errors[rank] = error

        world = World(rank, len(self.counts), 0, 1, "mpirun of Open MPI")
        return Heartbeat(world, exchange, counts, self.limits, give_up, lambda: self.activities[rank])

    def close(self):
        self.killed.update(range(len(self.all)))
        for one in self.all:
            one.close()

    def kill(self, *ranks):
        """Their sockets are closed, as of a process that gets SIGKILL."""
        self.killed.update(ranks)

    def pause(self, rank):
        """It does nothing, as a process that gets SIGSTOP, and its sockets stay open."""
        self.paused[rank].set()

    def resume(self, rank):
        self.paused[rank].clear()

    def work(self, seconds):
        """All are at work for so long."""
        with contextlib.ExitStack() as stack:
            for one in self.all:
                stack.enter_context(one.work())
            time.sleep(seconds)

    def wait_for(self, condition, seconds=20.0):
        until = time.monotonic() + seconds
        while not condition() and time.monotonic() < until:
            time.sleep(0.02)
        assert condition()

    def lost(self, rank):
        """The ranks that a process knows to be lost."""
        return set(self.all[rank]._tree.whole.lost)

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


@pytest.mark.thorough
def test_the_name_of_a_machine_need_not_be_known_elsewhere(monkeypatch, start):
    monkeypatch.setattr(socket, "gethostname", lambda: "this-machine-alone-knows.invalid")
    if heartbeat._hosts(World())[1:] == []:
        pytest.skip("this machine has no address that others could know")
    with warnings.catch_warnings(action="error"):
        job = start(BUSY, BUSY)
    job.work(3 * SECONDS)
    assert [one.silent() for one in job.all] == [[], []]
    assert job.errors == [None, None]


@pytest.mark.thorough
def test_one_that_cannot_be_connected_with_is_told_with_the_reason_and_is_not_given_up(monkeypatch, start):
    monkeypatch.setattr(heartbeat, "_hosts", lambda world: ["nowhere.invalid"])
    told = r"rank 1 cannot connect to the heartbeat of rank 0 \(nowhere.invalid: .*\). The job continues"
    with pytest.warns(RuntimeWarning, match=told):
        job = start(WAITS, WAITS)
    assert [list(one.unreachable) for one in job.all] == [[], [0]]
    job.work((heartbeat.ALL_WAIT + 3) * SECONDS)
    assert job.errors == [None, None]


def test_another_machine_with_the_address_is_not_taken_for_the_process(monkeypatch, start):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = other.accept()
                    with connection:
                        connection.sendall(b"another\n")
                        connection.recv(100)

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setattr(heartbeat, "_hosts", lambda world: ["127.0.0.1"])
        port = other.getsockname()[1]
        parse = Member.parse
        monkeypatch.setattr(Member, "parse", lambda message: parse(message)._replace(port=port))
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
    job.pause(1)
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
    assert re.match("Waiting for rank 1: alive, and busy for [01] s so far, for example in a callback", said[0])
    assert [one.others_are_busy() for one in job.all] == [True, False]


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


@pytest.mark.thorough
def test_where_all_wait_for_each_other_the_job_is_given_up(start):
    job = start(WAITS, WAITS)
    job.work((heartbeat.ALL_WAIT + 3) * SECONDS)
    assert all("have waited for each other" in sentence for sentence in job.sentences())


def wait(name, stage=0):
    return Activity(f"waiting for {name}", (name,), stage)


def test_those_that_wait_for_different_operations_are_given_up_soon_and_say_for_which(start):
    job = start(WAITS, WAITS, WAITS, activities=[wait("a"), wait("b"), wait("a")])
    job.work(4 * SECONDS)
    places = "rank 0 and rank 2 are waiting for a, and rank 1 is waiting for b"
    assert all(
        re.match(f"For . s nothing has moved, since the processes of the job are at different places: {places}", told)
        for told in job.sentences()
    )


def test_those_that_wait_for_the_same_operation_are_waited_for_longer(start):
    job = start(WAITS, WAITS, activities=[wait("a"), wait("a")])
    job.work(3 * SECONDS)
    assert job.errors == [None, None]


def test_where_some_processes_have_an_operation_of_their_own_the_others_may_wait_for_another(start):
    job = start(WAITS, WAITS, activities=[wait(SOME), wait("b")])
    job.work(3 * SECONDS)
    assert job.errors == [None, None]


def test_one_that_has_ended_what_another_is_in_is_not_waited_for(start):
    job = start(WAITS, BUSY, activities=[wait("a", stage=1), Activity("busy elsewhere", stage=2)])
    job.work(4 * SECONDS)
    assert "rank 0 is waiting for a, and rank 1 is busy elsewhere" in job.sentences()[0]
    assert job.sentences()[1] is None


def test_one_that_is_not_yet_where_another_waits_is_waited_for(start):
    job = start(WAITS, BUSY, activities=[wait("a", stage=3), Activity(stage=2)])
    job.work(4 * SECONDS)
    assert job.errors == [None, None]


SIZE = 40
# In the tree of 40 processes, rank 0 has the children 1, 10, 20 and 30, and rank 10 the children 11, 13, 15 and 17.
BELOW_10 = set(range(10, 20))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "killed",
    [
        pytest.param({39}, id="a leaf"),
        pytest.param({4}, id="a parent"),
        pytest.param({17, 18, 19}, id="a subtree"),
        pytest.param(BELOW_10, id="a quarter of all"),
        pytest.param({10, 17, 18, 19}, id="a parent, a child and its children"),
        pytest.param({10, 12, 16, 39}, id="a parent and grandchildren"),
        pytest.param({2, 3, 8, 20, 33, 38, 39}, id="several"),
        pytest.param({0}, id="rank 0"),
    ],
)
def test_all_name_all_that_were_killed_at_once(start, killed):
    job = start(*[WAITS] * SIZE, seconds=2.0)
    job.kill(*killed)
    left = set(range(SIZE)) - killed
    job.wait_for(lambda: all(job.errors[rank] for rank in left))
    told = f"Gone, or silent for 2 s: {World().named_all(killed)}"
    assert {job.errors[rank].sentence for rank in left} == {told}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("paused", [0, 4, 39])
def test_all_name_one_that_is_stopped(start, paused):
    job = start(*[WAITS] * SIZE, seconds=2.0)
    job.pause(paused)
    left = set(range(SIZE)) - {paused}
    job.wait_for(lambda: all(job.errors[rank] for rank in left))
    assert {job.errors[rank].sentence for rank in left} == {f"Gone, or silent for 2 s: rank {paused}"}


@pytest.mark.thorough
@pytest.mark.parametrize("paused", [0, 4, *(pytest.param(rank, marks=pytest.mark.exhaustive) for rank in (1, 39))])
def test_one_that_was_stopped_and_comes_back_is_not_accused_and_accuses_nobody(start, paused):
    job = start(*[BUSY] * SIZE, seconds=1.0)
    job.pause(paused)
    # Nobody waits for it, so that the job is not given up.
    job.wait_for(lambda: all(paused in job.lost(rank) for rank in range(SIZE) if rank != paused))
    job.resume(paused)
    job.wait_for(lambda: not any(map(job.lost, range(SIZE))))
    job.work(3.0)
    assert job.errors == [None] * SIZE
    assert job.all[0]._tree.whole.processes == SIZE


def test_those_are_found_that_a_lost_process_was_about_to_find():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = Member("x", ["127.0.0.1"], listener.getsockname()[1])
    with selectors.DefaultSelector() as selector:
        losses = Losses(selector, lambda rank: nobody, 40, [], grace_seconds=5.0)
        losses.lose(10, Loss.CLOSED, Summary(lost={17: Loss.CLOSED}), until=5.0)
        until = time.monotonic() + 5.0
        while 19 not in losses.lost and time.monotonic() < until:
            losses.step(0.0)
            for key, events in selector.select(0.1):
                key.data(events)
        losses.close()
    assert {10, 17, 18, 19} <= losses.lost.keys()


def test_one_that_was_adopted_and_is_lost_since_is_not_forgotten_for_old_news_of_its_adoption():
    said = [Member(str(rank), ["127.0.0.1"], 1).message() for rank in range(40)]
    tree = Tree(10, said, socket.create_server(("127.0.0.1", 0)), seconds=10.0)
    ours, theirs = socket.socketpair()
    tree._join_at(0, LineConnection(tree._selector, ours))
    tree._losses.lose(17, Loss.CLOSED, Summary(), until=10.0)
    tree._losses.lose(18, Loss.CLOSED, Summary(), until=10.0)
    tree._receive(tree._parent, as_line(Summary(adopted={18: 10})))
    assert tree._losses.lost.keys() == {17, 18}
    tree._receive(tree._parent, as_line(Summary(adopted={18: 0})))
    assert tree._losses.lost.keys() == {17}
    theirs.close()
    tree.close()


@pytest.mark.thorough
def test_a_process_whose_program_has_ended_is_gone_only_after_the_whole_timeout(start):
    job = start(*[BUSY] * 13, seconds=8.0)
    job.all[1].close()
    job.wait_for(lambda: all(job.lost(rank) == {1} for rank in range(13) if rank != 1))
    assert job.all[12].silent() == [1]
    job.work(5.5)  # one that was killed would be given up after 5 s
    assert job.errors == [None] * 13


def test_a_process_whose_program_has_ended_may_be_missed_for_longer_than_one_that_was_killed(monkeypatch, start):
    monkeypatch.setattr("tfdist.jobs.heartbeat_tree.LONGEST_GRACE_SECONDS", 0.2)
    job = start(*[BUSY] * 4, seconds=4.0)
    job.all[1].close()
    job.wait_for(lambda: all(job.lost(rank) == {1} for rank in (0, 2, 3)))
    job.work(1.5)  # one that was killed would be given up after 0.2 s
    assert job.errors == [None] * 4


def test_a_process_knows_of_all_others_through_few_connections(start):
    job = start(*[WAITS] * 39, BUSY, seconds=2.0)
    job.wait_for(lambda: all(one._tree.whole.waiting == SIZE - 1 for one in job.all))
    whole = job.all[20]._tree.whole
    assert (whole.processes, [rank for rank, _ in whole.busy], whole.lost) == (SIZE, [SIZE - 1], {})
    assert all(one.others_are_busy() for one in job.all[:39]) and not job.all[39].others_are_busy()
    assert max(len(one._tree._children) for one in job.all) == FAN_OUT


@pytest.mark.sampled(1)
@pytest.mark.parametrize("said", [b"", b"\n", b"[" * 50_000 + b"\n", b'{"rank": 1, "name": "x"}\n', b"\0" * 100_000])
def test_a_stranger_is_sent_away_and_changes_nothing(start, said):
    job = start(BUSY, BUSY, seconds=2.0)
    address = job.all[0]._listener.getsockname()[:2]
    with contextlib.suppress(ConnectionError), socket.create_connection(address, timeout=10) as connection:
        connection.sendall(said)
        with connection.makefile("rb") as lines:
            assert list(json.loads(lines.readline())) == ["tfdist", "challenge"]  # random, and nothing of the job
            assert lines.read() == b""
    job.work(1.0)
    assert [job.lost(0), job.lost(1)] == [set(), set()] and job.errors == [None, None]
