"""Sockets between the processes of a job; here between threads, each of which takes the part of a process."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from tfdist import communicators
from tfdist.cluster.world import World
from tfdist.communicators.sockets import HEADER, SECRET_BYTES, SocketCommunicator
from tfdist.errors import ClusterError, DisagreementError


class Meeting:
    """What the members of a job say to each other while they connect."""

    def __init__(self, size):
        self.size = size
        self.said = {}
        self.barrier = threading.Barrier(size)

    def exchange_as(self, rank):
        def exchange(message):
            self.barrier.wait(10)
            self.said[rank] = message
            self.barrier.wait(10)
            return [self.said[each] for each in range(self.size)]

        return exchange


def world(rank, size, host="127.0.0.1"):
    cluster = {"worker": [f"{host}:{2000 + index}" for index in range(size)]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
    return World.detect({"TF_CONFIG": json.dumps(task)})


def connected(rank, meeting, timeout_seconds=10.0, exchange=None, host="127.0.0.1"):
    exchange = exchange or meeting.exchange_as(rank)
    return SocketCommunicator(world(rank, meeting.size, host), exchange, 2.0, timeout_seconds)


def together(size, function, **options):
    """`function(communicator)` of each member, at once; what it raised in place of what it returned."""
    meeting = Meeting(size)

    def of(rank):
        try:
            communicator = connected(rank, meeting, **options)
            try:
                return function(communicator)
            finally:
                communicator.close()
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of, range(size)))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7, 300_001])
def test_sums_are_right_and_bit_by_bit_the_same_everywhere(size, count):
    values = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(size)]
    kept = [part.copy() for part in values]
    sums = together(size, lambda found: found.sum(values[found.rank]))
    np.testing.assert_allclose(sums[0], np.sum(values, axis=0), rtol=1e-5, atol=1e-5)
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0])
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64])
def test_each_type_is_added_in_its_own_shape(dtype):
    sums = together(3, lambda found: found.sum(np.full([2, 3], found.rank + 1, dtype)))
    assert [total.dtype for total in sums] == [dtype] * 3
    np.testing.assert_array_equal(np.array(sums, np.float64), np.full([3, 2, 3], 6.0))
    assert [float(total) for total in together(2, lambda found: found.sum(np.array(2.0, dtype)))] == [4.0, 4.0]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 4, 30_001])
def test_scattered_sums_are_bit_by_bit_the_parts_of_the_whole_sum(size, rows):
    values = [np.random.default_rng(rank).normal(size=[size * rows, 3]).astype(np.float32) for rank in range(size)]
    kept = [each.copy() for each in values]
    sums = together(size, lambda found: (found.sum_part(values[found.rank]), found.sum(values[found.rank])))
    for rank, (part, total) in enumerate(sums):
        np.testing.assert_array_equal(part, total[rank * rows : (rank + 1) * rows])
        np.testing.assert_allclose(total, np.sum(values, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64])
@pytest.mark.parametrize("length", [6, 8, 2])
def test_each_type_is_scattered_and_rows_that_do_not_divide_belong_to_nobody(dtype, length):
    parts = together(3, lambda found: found.sum_part(np.arange(length).astype(dtype)))
    rows = length // 3
    assert [part.dtype for part in parts] == [dtype] * 3
    np.testing.assert_array_equal(np.array(parts, np.float64).reshape(-1), 3.0 * np.arange(3 * rows))


def test_a_scattered_sum_sends_each_byte_of_the_other_parts_once():
    def sent(found):
        counted, send = [], found._send
        found._send = lambda data: counted.append(send(data)) or counted[-1]
        found.sum_part(np.ones(3_000_000, np.float32))
        return sum(counted)

    assert together(3, sent) == [12_000_000 * 2 // 3 + HEADER.size] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_different_lengths_are_joined_by_rank(size):
    joined = together(size, lambda found: found.join(np.full([found.rank, 2], found.rank, np.int64)))
    expected = np.array([[rank] * 2 for rank in range(size) for _ in range(rank)])
    for each in joined:
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 5, 3), (1, 0, 0), (7000, 3, 2001)])
def test_messages_longer_than_a_piece_come_whole(monkeypatch, lengths):
    monkeypatch.setattr(communicators, "GATHERED_BYTES", 3000)
    messages = [bytes(range(250)) * 28 for _ in lengths]
    messages = [message[:length] for message, length in zip(messages, lengths, strict=True)]
    assert together(3, lambda found: found.exchange(messages[found.rank])) == [messages] * 3


@pytest.mark.thorough  # seconds and gigabytes
def test_a_message_of_two_gibibytes_comes_whole():
    size = 2**31 + 8
    heard = together(2, lambda found: list(map(len, found.exchange(bytes(size if found.rank == 0 else 0)))))
    assert heard == [[size, 0]] * 2


def test_exchanges_of_different_sizes_are_refused_with_both_sizes():
    errors = together(2, lambda found: found.sum(np.zeros(10 + found.rank, np.float32)))
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert "40 bytes" in errors[0].sentence
    assert "44 bytes" in errors[0].sentence
    assert "worker 1" in errors[0].sentence


def test_a_sum_is_not_taken_for_a_scattered_sum_of_the_same_size():
    values = np.zeros(10, np.float32)
    errors = together(2, lambda found: found.sum_part(values) if found.rank else found.sum(values))
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert "a tensor to be scattered of 40 bytes" in errors[0].sentence


def test_who_hangs_up_is_named_at_once():
    began = time.monotonic()
    errors = together(2, lambda found: found.sum(np.zeros(10)) if found.rank == 0 else None)
    assert "worker 1" in errors[0].sentence
    assert time.monotonic() - began < 5


def test_who_is_silent_is_named_after_the_timeout():
    done = threading.Event()

    def use(found):
        if found.rank == 1:
            done.wait(10)
            return None
        try:
            return found.sum(np.zeros(10))
        finally:
            done.set()

    began = time.monotonic()
    errors = together(2, use, timeout_seconds=1.0)
    assert "silent for 1 s: worker 1" in errors[0].sentence
    assert 0.9 < time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("count", "said"),
    [(1, b"x" * SECRET_BYTES), (1, b""), (1, b"x"), (3, b"GET / HTTP/1.1\r\n\r\n"), (100, b"")],
    ids=["a wrong secret", "nothing", "a part", "another protocol", "nothing, often"],
)
def test_strangers_keep_nobody_out_and_are_sent_away(count, said):
    meeting = Meeting(2)
    strangers = []

    def exchange_of_0(message):
        if len(message) == SECRET_BYTES + 4:
            port = int.from_bytes(message[SECRET_BYTES:], "big")
            for _ in range(count):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                strangers[-1].sendall(said)
        return meeting.exchange_as(0)(message)

    exchanges = [exchange_of_0, meeting.exchange_as(1)]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: connected(rank, meeting, exchange=exchanges[rank]), range(2)))
        sums = list(pool.map(lambda found: found.sum(np.ones(3)), both))
    np.testing.assert_array_equal(sums, np.full([2, 3], 2.0))
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for connection in (*both, *strangers):
        connection.close()


def test_processes_find_each_other_by_ipv6():
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    sums = together(2, lambda found: found.sum(np.ones(3)), host="[::1]")
    np.testing.assert_array_equal(sums, np.full([2, 3], 2.0))


def test_processes_that_cannot_be_reached_are_named_in_all():
    # An address of a network that documentation alone uses (RFC 5737).
    errors = together(2, lambda found: found, host="192.0.2.1")
    assert all("worker 0" in error.sentence and "worker 1" in error.sentence for error in errors)
