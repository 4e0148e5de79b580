"""`tfdist.jobs.liveness`: which of the processes that TensorFlow waits for still answer, and which are lost."""

import contextlib
import socket
import threading
import time

import pytest

from tfdist.jobs import liveness, rendezvous
from tfdist.jobs.connections import Loss
from tfdist.jobs.liveness import Limits, LivenessProbe, State
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World

FIRST_FRAME = b"\0\0\0" + rendezvous.HTTP2_SETTINGS
LIMITS = Limits(seconds=0.4, start_seconds=0.8)


class Server:
    """Sends the first message of TensorFlow's server until it is stopped, like a process that gets SIGSTOP."""

    def __init__(self):
        self.is_stopped = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                if not self.is_stopped:
                    connection.sendall(FIRST_FRAME)

    def end(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in (self._listener, *self._connections):
            connection.close()


@pytest.fixture
def probing(monkeypatch):
    """Starts a probe of rank 0 for a number of servers; returns them and the list of what was lost, with the times."""
    monkeypatch.setattr(rendezvous, "SECONDS_TO_FIRST_BYTE", 0.1)
    monkeypatch.setattr(liveness, "SECONDS_AFTER_END", 0.2)
    started = []

    def start(count):
        servers = [Server() for _ in range(count)]
        tasks = (Task("chief", 0, "127.0.0.1:9"), *(Task("ps", i, s.address) for i, s in enumerate(servers)))
        world = World(0, count + 1, 0, count + 1, "a test", tasks)
        losses = []

        def lost(states):
            losses.append((time.monotonic(), liveness.gone(world, states, LIMITS).sentence))

        started.append((LivenessProbe(world, range(1, count + 1), LIMITS, lost), servers))
        wait_for(lambda: not started[-1][0].missing())
        time.sleep(0.2)  # all have answered once
        return servers, losses, world

    yield start
    for probe, servers in started:
        probe.close()
        for server in servers:
            with contextlib.suppress(OSError):
                server.end()


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_stopped_process_is_lost_in_time_and_named_and_one_that_answers_is_not(probing):
    (stopped, _), losses, world = probing(2)
    stopped.is_stopped, began = True, time.monotonic()
    wait_for(lambda: losses)
    assert 0.3 < losses[0][0] - began < 2
    time.sleep(0.3)
    assert [sentence for _, sentence in losses] == [f"Gone, or silent for 0.4 s: {world.named(1)}"]


def test_a_process_that_answers_again_may_be_lost_again(probing):
    (server,), losses, _ = probing(1)
    for count in (1, 2):
        server.is_stopped = True
        wait_for(lambda count=count: len(losses) == count)
        server.is_stopped = False
        time.sleep(0.3)


def test_processes_that_are_lost_together_are_named_together(probing):
    servers, losses, world = probing(3)
    for server in servers[1:]:
        server.is_stopped = True
    wait_for(lambda: losses)
    assert losses[0][1].endswith(f": {world.named(2)} and {world.named(3)}")


def test_a_process_that_never_answers_is_waited_for_as_long_as_the_start_may_take():
    state = State(1)
    state.note(Loss.CLOSED, 0.7)
    assert state.missed_part(LIMITS) < 1
    state.note(Loss.CLOSED, 0.2)
    assert state.missed_part(LIMITS) >= 1
    tasks = (Task("chief", 0, "127.0.0.1:9"), Task("ps", 0, "127.0.0.1:10"))
    error = liveness.gone(World(0, 2, 0, 2, "a test", tasks), [state], LIMITS)
    assert error.sentence == "TensorFlow's servers of ps 0 (127.0.0.1:10) did not answer within 0.8 s"


@pytest.mark.parametrize(("loss", "seconds"), [(Loss.CLOSED, 6.0), (Loss.SILENT, 60.0)])
def test_a_process_that_refuses_connections_is_lost_sooner_than_a_silent_process(loss, seconds):
    state, limits = State(1), Limits(seconds=60.0, start_seconds=60.0)
    state.note(None, 1.0)
    state.note(loss, seconds - 0.1)
    assert state.missed_part(limits) < 1
    state.note(loss, 0.2)
    assert state.missed_part(limits) >= 1


def test_what_a_probe_at_a_process_shows(monkeypatch):
    monkeypatch.setattr(rendezvous, "SECONDS_TO_FIRST_BYTE", 0.1)
    server = Server()
    task = Task("ps", 0, server.address)
    assert rendezvous.loss_of(task) is None and rendezvous.serves(task)
    server.is_stopped = True
    assert rendezvous.loss_of(task) is Loss.SILENT
    server.end()
    assert rendezvous.loss_of(task) is Loss.CLOSED and not rendezvous.serves(task)
