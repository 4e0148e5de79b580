"""The processes of a job meet on the chief's port: threads with real sockets stand for the processes."""

import contextlib
import json
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist import terminal
from tfdist.errors import ClusterError, DisagreementError
from tfdist.jobs import rendezvous, secret, world
from tfdist.jobs.connections import LONGEST_LINE_BYTES, Reception, as_line
from tfdist.jobs.rendezvous import CLUSTER, ChiefServer, Hello, described_cluster
from tfdist.jobs.tf_config import Task

CARD = {"TensorFlow": "2.21.0"}


def free_ports(count):
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def worlds_of(size):
    """The worlds of workers on this machine."""
    tasks = tuple(Task("worker", index, f"localhost:{port}") for index, port in enumerate(free_ports(size)))
    return [world.World(rank, size, rank, size, "TF_CONFIG", tasks) for rank in range(size)]


@pytest.fixture
def worlds():
    """The worlds of three workers on this machine."""
    return worlds_of(3)


def outcome(of_world, settings=CARD, seconds=20.0, after=0.0):
    """What `meet` returns, or what it raises."""
    time.sleep(after)
    try:
        return rendezvous.meet(of_world, settings, seconds)
    except ClusterError as error:
        return error


def meet_all(calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(outcome, *call) for call in calls]]


def test_everyone_goes_on_when_all_are_there_in_whatever_order_they_come(worlds):
    assert meet_all([(worlds[0], CARD, 20, 0.3), (worlds[1], CARD, 20, 0.0), (worlds[2], CARD, 20, 0.6)]) == [True] * 3


@pytest.mark.parametrize("started_by_hand", [True, False])
def test_processes_started_by_hand_say_for_whom_they_wait(worlds, monkeypatch, started_by_hand):
    said = []
    monkeypatch.setattr(rendezvous, "SECONDS_TO_SAY", 0.2)
    monkeypatch.setattr(terminal, "say", lambda line: said.append(line) if line.startswith("Waiting") else None)
    monkeypatch.delenv("TFDIST_JOB", raising=False)
    if not started_by_hand:
        monkeypatch.setenv("TFDIST_JOB", "a-job")
    meet_all([(worlds[0], CARD, 1.0), (worlds[1], CARD, 1.0)])
    first, missing = worlds[0].tasks[0].address, worlds[2].tasks[2].address
    lines = {
        f"Waiting for worker 2 ({missing}), for at most 1 s",
        f"Waiting for worker 0 ({first}), the chief, and those that it waits for, for at most 1 s",
    }
    assert set(said) == (lines if started_by_hand else set())


def test_a_world_of_one_waits_for_nobody():
    assert rendezvous.meet(world.World(), CARD, 0.0)


def test_a_rank_that_does_not_come_is_named_to_everyone_who_came(worlds):
    chief, other = meet_all([(worlds[0], CARD, 1.0), (worlds[1], CARD, 1.0)])
    for error in (chief, other):
        assert error.sentence == f"worker 2 ({worlds[2].tasks[2].address}) did not start within 1 s"


def test_a_chief_that_does_not_come_is_named(worlds):
    (error,) = meet_all([(worlds[1], CARD, 1.0)])
    assert f"worker 0 ({worlds[0].tasks[0].address})" in error.sentence
    assert "could not be reached within 1 s" in error.sentence


def test_the_shortest_deadline_counts_for_all(worlds):
    began = time.monotonic()
    errors = meet_all([(worlds[0], CARD, 60.0), (worlds[1], CARD, 1.0)])
    assert time.monotonic() - began < 10
    assert all("worker 2" in error.sentence and "within 1 s" in error.sentence for error in errors)


def test_cards_that_differ_are_refused_everywhere_with_each_value(worlds):
    errors = meet_all([(worlds[0], CARD), (worlds[1], {"TensorFlow": "2.20.0"}), (worlds[2], CARD)])
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert len({error.sentence for error in errors}) == 1
    for part in ("TensorFlow", "2.21.0", "2.20.0"):
        assert part in errors[0].sentence


def test_another_cluster_is_refused_at_once(worlds):
    config = json.loads(worlds[1].tf_config())
    cluster = config["cluster"] | {"worker": config["cluster"]["worker"][:2]}
    smaller = world.World.detect(
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})}
    )
    chief, other = meet_all([(worlds[0], CARD), (smaller, CARD)])
    assert isinstance(chief, DisagreementError) and CLUSTER in chief.sentence
    assert other.sentence == chief.sentence


def large_world(rank, size, moved=None):
    """A world of `size` processes, of which the last 8 are on the host `moved` if that is given."""
    hosts = [f"node{index // 8:04}.cluster.example.com" for index in range(size)]
    hosts[-8:] = [moved] * 8 if moved else hosts[-8:]
    tasks = tuple(Task("worker", index, f"{host}:{2222 + index % 8}") for index, host in enumerate(hosts))
    return world.World(rank, size, rank % 8, 8, "TF_CONFIG", tasks)


def test_a_hello_is_short_whatever_the_number_of_processes():
    assert len(json.dumps(large_world(0, 2000).cluster())) > LONGEST_LINE_BYTES
    assert len(as_line(hello_of(large_world(7, 2000)))) < LONGEST_LINE_BYTES / 100


def test_large_clusters_that_differ_in_one_address_are_told_apart():
    ours, others = (described_cluster(large_world(0, 2000, moved).cluster()) for moved in (None, "node9999"))
    assert ours.startswith("2000 processes from node0000.cluster.example.com:2222 to node0249.cluster.example.com:2229")
    assert ours != others and others == described_cluster(large_world(5, 2000, "node9999").cluster())


def test_many_processes_meet_and_equal_values_are_named_together():
    all_worlds = worlds_of(40)
    assert meet_all([(each,) for each in all_worlds]) == [True] * 40
    errors = meet_all([(each, {"TensorFlow": "2.20.0"} if each.rank in (7, 9) else CARD) for each in all_worlds])
    assert len({error.sentence for error in errors}) == 1
    assert errors[0].sentence == (
        "The processes of the job disagree on `TensorFlow`: ranks 0 to 6, 8 and 10 to 39 have `2.21.0`, "
        f"{all_worlds[0].named(7)} and {all_worlds[0].named(9)} have `2.20.0`"
    )


def test_many_different_values_are_cut():
    errors = meet_all([(each, {"seed": str(each.rank)}) for each in worlds_of(12)])
    assert errors[0].sentence.endswith("has `7`, and there are 4 more values")


def test_two_processes_with_the_same_task_are_refused(worlds):
    errors = meet_all([(worlds[0], CARD), (worlds[1], CARD, 20, 0.2), (worlds[1], CARD, 20, 0.4)])
    assert "say that they are worker 1" in errors[0].sentence


def prove(connection, of_world, key=None):
    """Proves to the chief that this test knows the secret of the job, or tries to with another `key`."""
    opening = secret.Opening(secret.of_job(of_world) if key is None else key)
    connection.settimeout(10)
    with connection.makefile("rb", buffering=0) as lines:
        connection.sendall(opening.respond(lines.readline()))
        return opening.is_proved_by(lines.readline())


def hello_of(of_world, settings=CARD):
    return Hello(
        rank=of_world.rank,
        seconds=9.0,
        deadline_seconds=9.0,
        world_size=of_world.world_size,
        cluster=described_cluster(of_world.cluster()),
        settings=settings,
    )


def test_a_second_process_with_a_task_is_refused_although_it_is_gone_at_once(worlds):
    hello = as_line(hello_of(worlds[1]))
    with socket.create_server(("localhost", 0)) as listener:
        address = listener.getsockname()
        first, second = socket.create_connection(address), socket.create_connection(address)
        settings = {CLUSTER: described_cluster(worlds[0].cluster()), **CARD}
        key = secret.of_job(worlds[0])

        def say():
            assert prove(first, worlds[1]) and prove(second, worlds[1])
            first.sendall(hello)
            second.sendall(hello)
            second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            second.close()  # which resets the connection

        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(say)
            server = ChiefServer(worlds[0], settings, listener, time.monotonic() + 2.0, 2.0, key)
            refusal = server.serve()
            said.result()
        first.close()
        server.close()
    assert refusal is not None


def test_a_rank_that_leaves_and_comes_again_is_counted_once(worlds):
    def leave_and_return():
        for _ in range(20):
            try:
                with socket.create_connection((worlds[0].tasks[0].host, worlds[0].tasks[0].port)) as connection:
                    assert prove(connection, worlds[1])
                    connection.sendall(as_line(hello_of(worlds[1])))
                    time.sleep(0.2)
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        return outcome(worlds[1])

    with ThreadPoolExecutor(3) as pool:
        again = pool.submit(leave_and_return)
        others = [pool.submit(outcome, worlds[0]), pool.submit(outcome, worlds[2], after=1.0)]
        assert [again.result(), *(future.result() for future in others)] == [True] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b'{"tfdist": 1, "rank": "1"}\n', b"[]\n", b""]
)
def test_a_stranger_is_not_looked_at(worlds, said):
    def disturb():
        for _ in range(40):
            try:
                with socket.create_connection((worlds[0].tasks[0].host, worlds[0].tasks[0].port)) as connection:
                    connection.sendall(said)
                    time.sleep(0.1)
                return
            except OSError:
                time.sleep(0.05)

    stranger = threading.Thread(target=disturb)
    stranger.start()
    assert meet_all([(worlds[0],), (worlds[1], CARD, 20, 0.5), (worlds[2], CARD, 20, 0.5)]) == [True] * 3
    stranger.join()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "said",
    [
        {"rank": 7},
        {"rank": 0},
        {"rank": 2, "world_size": 2},
        {"rank": 2, "cluster": None},
        {"rank": 2, "seconds": 0},
    ],
    ids=str,
)
def test_one_who_cannot_be_of_the_job_is_a_stranger_whatever_else_it_says(worlds, said):
    hello = json.loads(as_line(hello_of(worlds[1]))) | said

    def disturb():
        with connected_to(worlds[0].tasks[0]) as connection:
            assert prove(connection, worlds[1])
            connection.sendall(json.dumps(hello).encode() + b"\n")
            assert connection.recv(1) == b""  # it is sent away

    with ThreadPoolExecutor(4) as pool:
        stranger = pool.submit(disturb)
        calls = [pool.submit(outcome, world, CARD, 20.0, 0.5 * rank) for rank, world in enumerate(worlds)]
        assert [call.result() for call in calls] == [True] * 3
        stranger.result()


def test_a_process_with_another_secret_is_told_so_and_named(worlds, monkeypatch):
    secrets = {0: b"the secret of the job", 1: b"another secret"}
    monkeypatch.setattr(secret, "of_job", lambda of_world: secrets[of_world.rank])
    chief, other = meet_all([(worlds[0], CARD, 2.0), (worlds[1], CARD, 2.0)])
    assert "worker 1" in chief.sentence and "it does not know the secret of the job" in chief.sentence
    assert "it does not know the secret of this process" in other.sentence
    assert "TFDIST_SECRET_FILE" in chief.hint and "TFDIST_SECRET_FILE" in other.hint


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("attack", ["hello", "wrong proof", "reflected challenge", "replayed proof", "slow", "long"])
def test_who_does_not_know_the_secret_learns_nothing_and_takes_no_place(worlds, attack, rank):
    """A rank, a refused cluster or a short deadline of a stranger would end the job."""
    hello = as_line(hello_of(worlds[rank]).model_copy(update={"cluster": "{}", "seconds": 0.01}))
    received = []

    def stranger():
        with connected_to(worlds[0].tasks[0]) as connection, connection.makefile("rb") as lines:
            challenge = lines.readline()
            received.append(b"")
            if attack == "hello":
                connection.sendall(hello)
            elif attack == "wrong proof":
                connection.sendall(secret.Opening(b"").respond(challenge) + hello)
            elif attack == "reflected challenge":
                connection.sendall(challenge + hello)
            elif attack == "replayed proof":
                with connected_to(worlds[0].tasks[0]) as another, another.makefile("rb") as others:
                    earlier = secret.Opening(secret.of_job(worlds[0])).respond(others.readline())
                connection.sendall(earlier + hello)
            elif attack == "slow":
                for _ in range(20):
                    connection.sendall(b"{")
                    time.sleep(0.05)
            else:
                connection.sendall((1 << 63).to_bytes(8, "big") * 10_000)
            with contextlib.suppress(ConnectionError):
                received[0] = lines.read()

    with ThreadPoolExecutor(4) as pool:
        strange = pool.submit(stranger)
        calls = [pool.submit(outcome, world, CARD, 20.0, 0.5 * rank) for rank, world in enumerate(worlds)]
        assert [call.result() for call in calls] == [True] * 3
        with contextlib.suppress(ConnectionError):
            strange.result()
    assert received == [b""]


def test_silent_strangers_of_other_hosts_take_no_place_from_a_rank():
    with selectors.DefaultSelector() as selector, socket.create_server(("127.0.0.1", 0)) as listener:
        reception = Reception(selector, listener, Hello, lambda *_: True, b"key", most=4)
        address = listener.getsockname()
        strangers = [socket.create_connection(address, 5, ("127.0.0.2", 0)) for _ in range(3)]
        rank = socket.create_connection(address, 5, ("127.0.0.3", 0))
        strangers += [socket.create_connection(address, 5, ("127.0.0.2", 0)) for _ in range(9)]
        for _ in range(5):
            for key, events in selector.select(0.1):
                key.data(events)
        assert not _is_closed(rank)
        assert [_is_closed(stranger) for stranger in strangers] == [True] * 9 + [False] * 3
        reception.close()
        for connection in (*strangers, rank):
            connection.close()


def _is_closed(connection):
    connection.settimeout(5)
    with connection.makefile("rb", buffering=0) as lines:
        lines.readline()  # the challenge
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_without_a_secret_only_the_hosts_of_the_job_are_heard():
    tasks = (Task("worker", 0, "127.0.0.5:2222"), Task("worker", 1, "127.0.0.6:2222"))
    of_hosts = world.World(0, 2, 0, 1, "TF_CONFIG", tasks)
    assert {"127.0.0.5", "127.0.0.6", "127.0.0.1"} <= rendezvous.hosts_of(of_hosts)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ChiefServer(of_hosts, {CLUSTER: "", **CARD}, listener, time.monotonic() + 1.0, 1.0, b"")
        stranger = socket.create_connection(listener.getsockname(), 5, ("127.0.0.7", 0))
        refusal = server.serve()
        server.close()
        assert stranger.recv(1) == b""
        stranger.close()
    assert "A connection from 127.0.0.7 was refused: it is not a host of the job" in refusal.sentence


def test_a_host_whose_name_cannot_be_resolved_is_named_at_once(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    tasks = (Task("worker", 0, "localhost:2222"), Task("worker", 1, "no-such-host.invalid:2223"))
    began = time.monotonic()
    for rank in range(2):
        error = outcome(world.World(rank, 2, 0, 1, "TF_CONFIG", tasks), CARD, 60.0)
        assert "worker 1 (no-such-host.invalid:2223) is unknown" in error.sentence
    assert time.monotonic() - began < 20


def test_who_is_missing_in_an_exchange_is_named_to_everyone(worlds):
    told = threading.Event()

    def of(rank):
        try:
            with rendezvous.joined(worlds[rank], CARD, 20.0 if rank else 2.0) as exchange:
                if rank == 2:
                    return told.wait(20)
                return exchange(b"")
        except ClusterError as error:
            told.set()
            return error.sentence

    with ThreadPoolExecutor(3) as pool:
        chief, other, _ = pool.map(of, range(3))
    assert "while the job starts" in chief and "worker 2 " in chief and other == chief


def connected_to(task):
    for _ in range(100):
        try:
            return socket.create_connection((task.host, task.port), timeout=10)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_a_port_that_another_program_holds_is_named(worlds):
    with socket.create_server(("", worlds[0].tasks[0].port)):
        error = outcome(worlds[0])
    assert worlds[0].tasks[0].address in error.sentence and "in use" in error.sentence


def test_a_chief_that_serves_as_tensorflow_already_is_not_waited_for(worlds):
    """A process that comes back finds TensorFlow on the chief's port: an HTTP/2 server, which speaks first."""
    with socket.create_server(("localhost", worlds[0].tasks[0].port)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\0\0\x12" + rendezvous.HTTP2_SETTINGS + b"\0" * 18)
                connection.recv(1 << 16)

        server = threading.Thread(target=serve)
        server.start()
        assert outcome(worlds[1]) is False
        server.join()


def test_another_program_on_the_chiefs_port_is_shown(worlds):
    with socket.create_server(("localhost", worlds[0].tasks[0].port)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(1 << 16)

        server = threading.Thread(target=serve)
        server.start()
        error = outcome(worlds[1])
        server.join()
    assert "Another program" in error.sentence and "SSH-2.0-OpenSSH" in error.sentence


@pytest.mark.parametrize("part", [b"", b'{"error": nu', b"{"])
def test_a_part_of_the_answer_of_a_chief_that_dies_is_no_answer(part):
    worlds = worlds_of(2)
    acceptance = secret.Acceptance(secret.of_job(worlds[0]))

    def die_in_the_middle():
        with socket.create_server(("localhost", worlds[0].tasks[0].port)) as listener:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb", buffering=0) as lines:
                connection.sendall(acceptance.challenge())
                connection.sendall(acceptance.respond(lines.readline()))
                assert Hello.model_validate_json(lines.readline()).rank == 1
                connection.sendall(part)
        return outcome(worlds[0])  # as the chief that its launcher starts again

    with ThreadPoolExecutor(2) as pool:
        chief = pool.submit(die_in_the_middle)
        assert pool.submit(outcome, worlds[1], after=0.2).result() is True
        assert chief.result() is True
