"""`tfdist.jobs.lookout`: which of the processes that TensorFlow waits for still answer, and which are lost."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest

from tfdist.jobs import lookout, rendezvous
from tfdist.jobs.connections import Loss
from tfdist.jobs.lookout import Limits, Lookout, Presence
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
def looking(monkeypatch):
    """Starts a lookout of rank 0 for so many servers; returns them and the list of what was lost, with the times."""
    monkeypatch.setattr(rendezvous, "SECONDS_TO_FIRST_BYTE", 0.1)
    monkeypatch.setattr(lookout, "SECONDS_AFTER_END", 0.2)
    started = []

    def start(count):
        servers = [Server() for _ in range(count)]
        tasks = (Task("chief", 0, "127.0.0.1:9"), *(Task("ps", i, s.address) for i, s in enumerate(servers)))
        world = World(0, count + 1, 0, count + 1, "a test", tasks)
        losses = []

        def lost(presences):
            losses.append((time.monotonic(), lookout.gone(world, presences, LIMITS).sentence))

        started.append((Lookout(world, range(1, count + 1), LIMITS, lost), servers))
        wait_for(lambda: not started[-1][0].missing())
        time.sleep(0.2)  # all have answered once
        return servers, losses, world

    yield start
    for looked_out, servers in started:
        looked_out.close()
        for server in servers:
            with contextlib.suppress(OSError):
                server.end()


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_stopped_process_is_lost_in_time_and_named_and_one_that_answers_is_not(looking):
    (stopped, _), losses, world = looking(2)
    stopped.is_stopped, began = True, time.monotonic()
    wait_for(lambda: losses)
    assert 0.3 < losses[0][0] - began < 2
    time.sleep(0.3)
    assert [sentence for _, sentence in losses] == [f"Gone, or silent for 0.4 s: {world.named(1)}"]


def test_a_process_that_answers_again_may_be_lost_again(looking):
    (server,), losses, _ = looking(1)
    for count in (1, 2):
        server.is_stopped = True
        wait_for(lambda count=count: len(losses) == count)
        server.is_stopped = False
        time.sleep(0.3)


def test_processes_that_are_lost_together_are_named_together(looking):
    servers, losses, world = looking(3)
    for server in servers[1:]:
        server.is_stopped = True
    wait_for(lambda: losses)
    assert losses[0][1].endswith(f": {world.named(2)} and {world.named(3)}")


def test_a_process_that_never_answers_is_waited_for_as_long_as_the_start_may_take():
    presence = Presence(1)
    presence.look(Loss.CLOSED, 0.7)
    assert presence.missed_part(LIMITS) < 1
    presence.look(Loss.CLOSED, 0.2)
    assert presence.missed_part(LIMITS) >= 1
    tasks = (Task("chief", 0, "127.0.0.1:9"), Task("ps", 0, "127.0.0.1:10"))
    error = lookout.gone(World(0, 2, 0, 2, "a test", tasks), [presence], LIMITS)
    assert error.sentence == "TensorFlow's servers of ps 0 (127.0.0.1:10) did not answer within 0.8 s"


@pytest.mark.parametrize(("loss", "seconds"), [(Loss.CLOSED, 6.0), (Loss.SILENT, 60.0)])
def test_a_process_that_refuses_connections_is_lost_sooner_than_a_silent_process(loss, seconds):
    presence, limits = Presence(1), Limits(seconds=60.0, start_seconds=60.0)
    presence.look(None, 1.0)
    presence.look(loss, seconds - 0.1)
    assert presence.missed_part(limits) < 1
    presence.look(loss, 0.2)
    assert presence.missed_part(limits) >= 1


def test_what_a_look_at_a_process_shows(monkeypatch):
    monkeypatch.setattr(rendezvous, "SECONDS_TO_FIRST_BYTE", 0.1)
    server = Server()
    task = Task("ps", 0, server.address)
    assert rendezvous.loss_of(task) is None and rendezvous.serves(task)
    server.is_stopped = True
    assert rendezvous.loss_of(task) is Loss.SILENT
    server.end()
    assert rendezvous.loss_of(task) is Loss.CLOSED and not rendezvous.serves(task)


FAILING = """
import atexit, sys, threading
from tfdist.jobs import process_exit

class Blocking:
    def __del__(self):
        threading.Event().wait()  # like TensorFlow's objects whose server is stopped

process_exit.end_at_failure()
kept = Blocking()
print("before", end="")
raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code"), [("KeyboardInterrupt", 130), ("ValueError('wrong')", 1)], ids=["interrupt", "error"]
)
def test_a_process_ends_after_an_error_although_a_destructor_waits_without_limit(error, code):
    command = [sys.executable, "-c", FAILING.replace("{error}", error)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (code, "before")
    assert error.partition("(")[0] in done.stderr
