"""Sockets between the processes of a job; here between threads, each of which takes the part of a process."""

import contextlib
import json
import os
import random
import re
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist import groups
from tfdist.errors import ClusterError, DisagreementError, UsageError
from tfdist.groups import joining
from tfdist.groups.arrays import ArrayGroup
from tfdist.groups.socket_group import SocketGroup
from tfdist.groups.sockets import costs, hosts, messages
from tfdist.groups.sockets.operations import ALL_REDUCE, HEADER, Operation
from tfdist.groups.sockets.ring import Ring
from tfdist.jobs import ports
from tfdist.jobs.connections import Hello, Member, as_line
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World

# The number of processes, and of the hosts that they are on: one, as many, and some in between.
SPREADS = [(2, 1), (2, 2), (3, 3), (5, 1), (5, 2), (5, 5), (7, 3)]


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


def spread(size, hosts):
    """The host of each process, which are spread over hosts; all of these mean this machine."""
    return [f"127.0.0.{1 + rank * hosts // size}" for rank in range(size)]


def world(rank, hosts):
    cluster = {"worker": [f"{host}:{2000 + index}" for index, host in enumerate(hosts)]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
    return World.detect({"TF_CONFIG": json.dumps(task)})


def connected(rank, meeting, timeout_seconds=10.0, exchange=None, hosts=1):
    exchange = exchange or meeting.exchange_as(rank)
    hosts = spread(meeting.size, hosts) if isinstance(hosts, int) else hosts
    return SocketGroup(world(rank, hosts), exchange, 2.0, timeout_seconds)


def together(size, function, **options):
    """`function(group)` of each member, at once; what it raised in place of what it returned."""
    meeting = Meeting(size)

    def of(rank):
        try:
            group = connected(rank, meeting, **options)
            try:
                return function(group)
            finally:
                group.close()
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(of, range(size)))


@pytest.mark.parametrize(("size", "hosts"), SPREADS)
@pytest.mark.parametrize("count", [0, 1, 4, 7, 600_001])
def test_sums_are_right_and_bit_by_bit_the_same_everywhere(size, hosts, count):
    values = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(size)]
    kept = [part.copy() for part in values]
    sums = together(size, lambda found: found.sockets.sum(values[found.rank]), hosts=hosts)
    np.testing.assert_allclose(sums[0], np.sum(values, axis=0), rtol=1e-5, atol=1e-5)
    for other in sums[1:]:
        np.testing.assert_array_equal(other, sums[0])
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64])
def test_each_type_is_added_in_its_own_shape(dtype):
    sums = together(3, lambda found: found.sockets.sum(np.full([2, 3], found.rank + 1, dtype)))
    assert [total.dtype for total in sums] == [dtype] * 3
    np.testing.assert_array_equal(np.array(sums, np.float64), np.full([3, 2, 3], 6.0))
    assert [float(total) for total in together(2, lambda found: found.sockets.sum(np.array(2.0, dtype)))] == [4.0, 4.0]


@pytest.mark.parametrize(("size", "hosts"), SPREADS)
@pytest.mark.parametrize("rows", [0, 1, 4, 30_001])
def test_scattered_sums_are_bit_by_bit_the_parts_of_the_whole_sum(size, hosts, rows):
    values = [np.random.default_rng(rank).normal(size=[size * rows, 3]).astype(np.float32) for rank in range(size)]
    kept = [each.copy() for each in values]

    def both(found):
        return found.sockets.sum_part(values[found.rank]), found.sockets.sum(values[found.rank])

    sums = together(size, both, hosts=hosts)
    for rank, (part, total) in enumerate(sums):
        np.testing.assert_array_equal(part, total[rank * rows : (rank + 1) * rows])
        np.testing.assert_allclose(total, np.sum(values, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(values, kept)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64])
@pytest.mark.parametrize("length", [6, 8, 2])
def test_each_type_is_scattered_and_rows_that_do_not_divide_belong_to_nobody(dtype, length):
    parts = together(3, lambda found: found.sockets.sum_part(np.arange(length).astype(dtype)))
    rows = length // 3
    assert [part.dtype for part in parts] == [dtype] * 3
    np.testing.assert_array_equal(np.array(parts, np.float64).reshape(-1), 3.0 * np.arange(3 * rows))


@pytest.mark.parametrize("dtype", [tf.complex64, tf.complex128])
def test_complex_numbers_are_added_with_their_imaginary_parts(dtype):
    def sums(found):
        values = tf.cast(tf.complex([1.0, 2.0, 3.0, 4.0], float(found.rank)), dtype)
        return found.all_reduce([values], "whole")[0].numpy(), found.reduce_scatter(values, "parts").numpy()

    for rank, (whole, part) in enumerate(together(2, sums)):
        np.testing.assert_array_equal(whole, np.array([2, 4, 6, 8]) + 1j)
        np.testing.assert_array_equal(part, whole[2 * rank : 2 * rank + 2])


def test_a_scattered_sum_sends_each_byte_of_the_other_parts_once():
    def sent(found):
        found.sockets.sum_part(np.ones(3_000_000, np.float32))
        return found.sockets.traffic()[1]

    headers = 2 * HEADER.size, HEADER.size, HEADER.size  # down the tree from process 0, and up from the others
    assert together(3, sent, hosts=3) == [12_000_000 * 2 // 3 + each for each in headers]


@pytest.mark.parametrize(("size", "hosts"), SPREADS)
@pytest.mark.parametrize("rows", [1, 50_001])
def test_parts_of_different_lengths_are_joined_by_rank(size, hosts, rows):
    def join(found):
        return found.sockets.join(np.arange(2 * rows * found.rank).reshape(-1, 2) + found.rank)

    joined = together(size, join, hosts=hosts)
    expected = np.concatenate([np.arange(2 * rows * rank).reshape(-1, 2) + rank for rank in range(size)])
    for each in joined:
        np.testing.assert_array_equal(each, expected)


@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 5, 3), (1, 0, 0), (7000, 3, 2001), (0, 0, 7000)])
def test_messages_that_are_too_long_for_the_tree_come_whole(monkeypatch, lengths, hosts):
    monkeypatch.setattr(costs, "longest_by_tree", lambda size, hosts: 3000)
    messages = [bytes(range(250)) * 28 for _ in lengths]
    messages = [message[:length] for message, length in zip(messages, lengths, strict=True)]
    assert together(3, lambda found: found.exchange(messages[found.rank]), hosts=hosts) == [messages] * 3


@pytest.mark.parametrize("size", [2, 3, 6, 23])
def test_messages_come_by_rank_whoever_says_the_same(size):
    said = [b"even" if rank % 2 == 0 else b"" if rank < 6 else bytes(rank) for rank in range(size)]
    assert together(size, lambda found: found.exchange(said[found.rank])) == [said] * size


def test_an_agreement_takes_the_same_bytes_per_connection_however_many_agree():
    def sent(found):
        before = found.sockets.traffic()[1]
        found.exchange(b"the same")
        return found.sockets.traffic()[1] - before

    few, many = together(3, sent), together(30, sent)
    assert few[1] == many[29]  # both have no children
    assert sum(few) / 2 == sum(many) / 29


def test_an_exchange_that_is_a_part_of_another_one_is_counted_once():
    group = ArrayGroup()
    for _ in range(2):
        with group.counted(8) as received:
            with group.counted(8) as received_within:
                received_within(16)
            received(16)
    found = group.exchanged()
    assert (found.exchanges, found.sent_bytes, found.received_bytes) == (2, 2 * 8, 2 * 16)


def test_connections_grow_with_the_number_of_processes_and_not_with_its_square():
    def ends(found):
        assert list(found.sockets.pairs) == []
        return found.sockets.traffic()[0]

    # Each connection of the ring, of the tree and of the tree of the host has two ends.
    assert sum(together(20, ends, hosts=20)) == 2 * (20 + 19)
    assert sum(together(20, ends, hosts=1)) == 2 * (20 + 19 + 19)
    assert sum(together(20, ends, hosts=4)) == 2 * (20 + 19 + 4 * 4 + 4)


def test_a_connection_for_messages_is_made_when_it_is_first_used():
    def use(found):
        if found.rank == 2:
            found.send(np.ones(3), 5)
            found.send(np.ones(3), 5)
        if found.rank == 5:
            found.receive(2)
            found.receive(2)
        found.barrier()
        return len(list(found.sockets.pairs)) > 0

    assert together(7, use) == [rank in (2, 5) for rank in range(7)]


def test_descriptors_above_1024_are_waited_for():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("this machine allows no more descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))

        def use(found):
            found.send(np.ones(300_000), 1 - found.rank)
            found.receive(1 - found.rank)
            return found.sockets.sum(np.ones(300_000)).sum(), found.exchange(b"x")

        assert together(2, use) == [(600_000, [b"x", b"x"])] * 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


OTHERS = {
    "a small sum": lambda sockets: sockets.sum(np.zeros(3)),
    "a large sum": lambda sockets: sockets.sum(np.zeros(3_000_000)),
    "a scattered sum": lambda sockets: sockets.sum_part(np.zeros(10)),
    "rows": lambda sockets: sockets.join(np.zeros([2, 2])),
    "a message": lambda sockets: sockets.exchange(b"x"),
}


@pytest.mark.parametrize("odd", [0, 4, 5])
@pytest.mark.parametrize(("most", "other"), [*zip(OTHERS, [*OTHERS][1:], strict=False), ("a message", "a large sum")])
def test_all_are_told_which_process_does_something_else(most, other, odd):
    errors = together(6, lambda found: OTHERS[other if found.rank == odd else most](found.sockets))
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert {error.sentence for error in errors} == {errors[0].sentence}
    assert f"worker {odd} " in errors[0].sentence


@pytest.mark.parametrize("gone", [1, 4, 5])
def test_all_are_told_which_process_has_gone(gone):
    began = time.monotonic()
    errors = together(6, lambda found: None if found.rank == gone else found.exchange(b""))
    assert time.monotonic() - began < 5
    assert all(f"worker {gone} " in error.sentence for rank, error in enumerate(errors) if rank != gone)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("hosts", [1, 3, 8])
@pytest.mark.parametrize("gone", [0, 1, 7])
def test_all_are_told_which_process_has_gone_in_the_middle_of_a_large_sum(gone, hosts):
    values = np.zeros(3_000_000, np.float32)

    def use(found):
        if found.rank == gone:  # as one that is killed after all have begun
            return found.sockets._tree.agree(Operation(1, ALL_REDUCE, values.nbytes))
        return found.sockets.sum(values)

    errors = together(8, use, hosts=hosts)
    for rank in set(range(8)) - {gone}:
        assert set(re.findall(r"worker (\d)", errors[rank].sentence)) == {str(gone)}, (rank, errors[rank].sentence)


def test_one_that_ends_after_a_large_sum_is_not_missed_by_those_that_are_still_adding(monkeypatch):
    swap = Ring.swap

    def slow(ring, *arguments):
        if ring._rank == 2:
            time.sleep(0.1)
        return swap(ring, *arguments)

    monkeypatch.setattr(Ring, "swap", slow)
    sums = together(4, lambda found: found.sockets.sum(np.ones(300_000)).sum(), hosts=4)
    assert sums == [1_200_000.0] * 4


def test_the_error_of_one_that_hangs_up_is_heard_although_it_can_no_longer_be_sent_to(monkeypatch):
    monkeypatch.setattr(costs, "longest_by_tree", lambda size, hosts: 1 << 40)
    error = ClusterError("the disk of worker 7 is full", "empty it")

    def use(found):
        if found.rank == 0:
            return found.sockets.sum(np.zeros(10_000_000))
        time.sleep(0.3)  # until the other one waits in the middle of what it sends
        found.sockets._session.fail(error)

    assert [each.sentence for each in together(2, use)] == [error.sentence] * 2


def test_the_processes_of_one_host_add_up_in_memory_and_those_of_others_are_reached_by_their_first():
    def sent(found):
        before = found.sockets.traffic()[1]
        found.sockets.sum(np.ones(1_000_000))
        return found.sockets.traffic()[1] - before

    assert max(together(4, sent, hosts=1)) < 1000
    on_two = together(4, sent, hosts=2)
    assert [sent // 1000 for sent in on_two] == [8000, 0, 8000, 0]


def test_every_round_of_the_memory_is_of_its_own_sum(monkeypatch):
    """Sums, parts and rows of any size in turns: whoever is late reads what was meant for it."""
    monkeypatch.setattr(hosts, "LARGEST_MEMORY_BYTES", 1 << 20)  # rounds would differ on hosts of one and two processes
    monkeypatch.setattr(costs, "longest_by_tree", lambda size, hosts: -1)
    meet = hosts.Hosts._meet

    def late(of_host):
        meet(of_host)
        if random.random() < 0.3:
            time.sleep(0.001 * random.random())

    monkeypatch.setattr(hosts.Hosts, "_meet", late)
    sizes = np.random.default_rng(1).integers(0, 60_000, 60)

    def use(found):
        for number, size in enumerate(sizes):
            values = np.arange(3 * size) + number
            whole, rank = 3 * values, found.rank
            if number % 3 == 0:
                np.testing.assert_array_equal(found.sockets.sum(values + rank - 1), whole)
            if number % 3 == 1:
                part = found.sockets.sum_part(values + rank - 1)
                np.testing.assert_array_equal(part, whole[rank * size : (rank + 1) * size])
            if number % 3 == 2:
                joined = found.sockets.join(values[: size * rank])
                np.testing.assert_array_equal(joined, np.concatenate([values[: size * each] for each in range(3)]))

    for of_hosts in (1, 2):
        assert together(3, use, hosts=of_hosts) == [None] * 3


@pytest.mark.parametrize(
    "where",
    [["a", "b", "a", "b"], [f"host-{number}" for number in range(4)], ["a"] * 1000],
    ids=["by turns", "apart", "many"],
)
def test_some_processes_do_without_common_memory(where):
    assert hosts.by_host(where) == [range(rank, rank + 1) for rank in range(len(where))]


def test_processes_whose_hosts_have_one_name_but_no_common_memory_use_sockets(monkeypatch):
    """Containers may have one host name, and number their processes alike."""
    create = hosts.create

    def create_in_another_container(size):
        memory, offer = create(size)
        offer.message = offer.message[:-1] + bytes([offer.message[-1] ^ 1])
        return memory, offer

    monkeypatch.setattr(hosts, "create", create_in_another_container)

    def use(found):
        return found.sockets._hosts, found.sockets.sum(np.ones(300_000)).sum()

    assert together(4, use) == [(None, 1_200_000)] * 4


def test_a_system_without_such_memory_uses_sockets(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert together(3, lambda found: found.sockets.sum(np.ones(300_000)).sum()) == [900_000] * 3


def test_the_memory_has_no_file():
    def names(found):
        with open("/proc/self/maps") as maps:
            of_memory = {line.split(maxsplit=5)[5].strip() for line in maps if "tfdist" in line}
        found.barrier()
        return {name for name in of_memory if "memfd" in name}

    for found in together(2, names):
        assert found and all(name.endswith("(deleted)") for name in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("silent", [0, 4])
def test_all_are_told_which_process_is_silent_in_the_middle_of_a_large_sum(silent, hosts):
    done = threading.Event()
    told = threading.Barrier(5, done.set)
    values = np.zeros(3_000_000, np.float32)

    def use(found):
        if found.rank == silent:  # as one that is stopped after all have begun
            found.sockets._tree.agree(Operation(1, ALL_REDUCE, values.nbytes))
            return done.wait(10)
        try:
            return found.sockets.sum(values)
        finally:
            told.wait(10)

    errors = together(6, use, timeout_seconds=1.0, hosts=hosts)
    for rank in set(range(6)) - {silent}:
        assert set(re.findall(r"worker (\d)", errors[rank].sentence)) == {str(silent)}, (rank, errors[rank].sentence)


def test_who_waits_in_a_large_sum_may_be_told_why_to_give_up():
    def use(found):
        if found.rank == 2:
            found.sockets._tree.agree(Operation(1, ALL_REDUCE, 2_400_000))
            return time.sleep(1)
        if found.rank == 0:
            threading.Timer(0.2, found.sockets.give_up, [ClusterError("the job is given up", "try again")]).start()
        return found.sockets.sum(np.ones(300_000))

    assert together(3, use, timeout_seconds=5.0)[0].sentence == "the job is given up"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("silent", [0, 4, 5])
def test_all_are_told_which_process_is_silent(silent):
    done = threading.Event()
    told = threading.Barrier(5, done.set)

    def use(found):
        if found.rank == silent:
            return done.wait(10)
        try:
            return found.exchange(b"")
        finally:
            told.wait(10)

    errors = together(6, use, timeout_seconds=1.0)
    assert all(f"worker {silent} " in error.sentence for rank, error in enumerate(errors) if rank != silent)


@pytest.mark.exhaustive  # seconds and gigabytes
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_message_of_two_gibibytes_comes_whole(hosts):
    size = 2**31 + 8
    heard = together(
        2, lambda found: list(map(len, found.exchange(bytes(size if found.rank == 0 else 0)))), hosts=hosts
    )
    assert heard == [[size, 0]] * 2


def test_exchanges_of_different_sizes_are_refused_with_both_sizes():
    errors = together(2, lambda found: found.sockets.sum(np.zeros(10 + found.rank, np.float32)))
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert "40 bytes" in errors[0].sentence
    assert "44 bytes" in errors[0].sentence
    assert "worker 1" in errors[0].sentence


def test_a_sum_is_not_taken_for_a_scattered_sum_of_the_same_size():
    values = np.zeros(10, np.float32)
    errors = together(2, lambda found: found.sockets.sum_part(values) if found.rank else found.sockets.sum(values))
    assert all(isinstance(error, DisagreementError) for error in errors)
    assert "a tensor to be scattered of 40 bytes" in errors[0].sentence


def test_who_hangs_up_is_named_at_once():
    began = time.monotonic()
    errors = together(2, lambda found: found.sockets.sum(np.zeros(10)) if found.rank == 0 else None)
    assert "worker 1" in errors[0].sentence
    assert time.monotonic() - began < 5


def test_who_is_silent_is_named_after_the_timeout():
    done = threading.Event()

    def use(found):
        if found.rank == 1:
            done.wait(10)
            return None
        try:
            return found.sockets.sum(np.zeros(10))
        finally:
            done.set()

    began = time.monotonic()
    errors = together(2, use, timeout_seconds=1.0)
    assert "silent for 1 s: worker 1" in errors[0].sentence
    assert 0.9 < time.monotonic() - began < 5


def test_a_job_that_is_joined_has_its_own_timeout_and_not_that_of_its_start():
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    tasks = tuple(Task("worker", rank, f"127.0.0.1:{one.getsockname()[1]}") for rank, one in enumerate(listeners))
    for one in listeners:
        one.close()
    told = threading.Event()

    def of(rank):
        joined = joining.join("sockets", World(rank, 2, rank, 2, "TF_CONFIG", tasks), "multiworker", 1.0, 30.0)
        with contextlib.closing(joined):
            if rank == 1:
                return told.wait(20)
            try:
                return joined.exchange(b"")
            except ClusterError as error:
                told.set()
                return error.sentence

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        sentence, was_told = pool.map(of, range(2))
    joining.join_sockets.cache_clear()
    assert was_told and "worker 1 " in sentence
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (1, as_line(Hello(rank=1, proof="x" * 64))),
        (1, b""),
        (1, b"x"),
        (3, b"GET / HTTP/1.1\r\n\r\n"),
        (100, b""),
    ],
    ids=["a wrong secret", "nothing", "a part", "another protocol", "nothing, often"],
)
def test_strangers_keep_nobody_out_and_are_sent_away(count, said):
    meeting = Meeting(2)
    strangers = []

    def exchange_of_0(message):
        if message:  # the first one; the second one reports no problem
            port = Member.parse(message).port
            for _ in range(count):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                strangers[-1].sendall(said)
        return meeting.exchange_as(0)(message)

    exchanges = [exchange_of_0, meeting.exchange_as(1)]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: connected(rank, meeting, exchange=exchanges[rank]), range(2)))
        sums = list(pool.map(lambda found: found.sockets.sum(np.ones(3)), both))
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
    sums = together(2, lambda found: found.sockets.sum(np.ones(3)), hosts=["[::1]"] * 2)
    np.testing.assert_array_equal(sums, np.full([2, 3], 2.0))


def test_processes_that_cannot_be_reached_are_named_in_all():
    # Addresses of a network that documentation alone uses (RFC 5737).
    errors = together(2, lambda found: found, hosts=["192.0.2.1", "192.0.2.2"])
    assert all("worker 0" in error.sentence and "worker 1" in error.sentence for error in errors)


def test_messages_come_whole_in_order_and_by_their_tags():
    def use(found):
        if found.rank == 0:
            for number in range(20):
                found.send(np.full([number, 3], number, np.float32), to=2, tag=number % 2)
            return None
        if found.rank == 1:
            found.send(np.int64(7), to=2)
            return None
        odd = [found.receive(0, tag=1) for _ in range(10)]
        even = [found.receive(from_=0) for _ in range(10)]
        return odd, even, found.receive(1)

    odd, even, of_1 = together(3, use)[2]
    for first, received in ((1, odd), (0, even)):
        for number, values in zip(range(first, 20, 2), received, strict=True):
            np.testing.assert_array_equal(values, np.full([number, 3], number, np.float32), strict=True)
    np.testing.assert_array_equal(of_1, np.int64(7), strict=True)


SENT_DTYPES = [
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    "f2",
    "f4",
    "f8",
    "i1",
    "u1",
    "i4",
    "u4",
    "i8",
    "u8",
    "?",
    "c8",
    "c16",
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", SENT_DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 2)], ids=str)
def test_a_message_has_the_dtype_and_the_shape_that_were_sent(dtype, shape):
    values = np.ones(shape, dtype)
    there, back = together(2, lambda found: (found.send(values, 1 - found.rank), found.receive(1 - found.rank))[1])
    for received in (there, back):
        assert received.dtype == values.dtype
        np.testing.assert_array_equal(received.astype("c16"), values.astype("c16"), strict=True)


def test_tensors_variables_and_views_are_sent():
    def use(found):
        if found.rank == 0:
            found.send(tf.ones([2], tf.bfloat16), 1)
            found.send(tf.Variable([1, 2]), 1)
            found.send(np.arange(6).reshape(2, 3).T, 1)
            return None
        return [found.receive(0) for _ in range(3)]

    bfloat16, variable, view = together(2, use)[1]
    assert bfloat16.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(variable, np.array([1, 2], np.int32), strict=True)
    np.testing.assert_array_equal(view, [[0, 3], [1, 4], [2, 5]])


@pytest.mark.parametrize("values", ["text", [b"bytes"], np.array([None])], ids=["str", "bytes", "object"])
def test_what_is_no_number_is_not_sent(values):
    def use(found):
        with pytest.raises(UsageError, match="cannot be sent"):
            found.send(values, 1 - found.rank)

    together(2, use)


def test_large_messages_cross_without_a_deadlock_and_do_not_touch_the_sums():
    def use(found):
        values, received = np.arange(4_000_000) + found.rank, []
        for _ in range(3):
            for other in range(3):
                if other != found.rank:
                    found.send(values, other, tag=9)
            received += [found.receive(other, tag=9)[-1] - other for other in range(3) if other != found.rank]
            assert found.sockets.sum(np.ones(5)).tolist() == [3.0] * 5
        return received

    assert together(3, use) == [[3_999_999] * 6] * 3


def test_what_was_sent_may_be_changed_at_once():
    def use(found):
        if found.rank == 0:
            values = np.zeros(1_000_000)
            for number in range(5):
                values[:] = number
                found.send(values, 1)
            return None
        return [np.unique(found.receive(0)).tolist() for _ in range(5)]

    assert together(2, use)[1] == [[number] for number in range(5)]


def test_a_probe_names_those_whose_message_has_come_and_does_not_wait():
    ready = threading.Barrier(3)

    def use(found):
        if found.rank == 1:
            nothing = found.probe(), found.probe(tag=4)
            ready.wait(10)
            ready.wait(10)
            senders = found.probe(), found.probe(tag=4)
            values = found.receive(2, tag=4), found.receive(0, tag=4), found.receive(2, tag=4)
            return nothing, senders, [v.item() for v in values], found.probe(tag=4)
        ready.wait(10)
        for number in range(found.rank):
            found.send(np.array(number), 1, tag=4)
        if found.rank == 0:
            found.send(np.array(5), 1, tag=4)
        ready.wait(10)
        return None

    assert together(3, use)[1] == (([], []), ([], [0, 2]), [0, 5, 1], [])


def test_what_one_has_sent_before_it_left_is_received_and_then_it_is_named():
    def use(found):
        if found.rank == 1:
            found.send(np.arange(3), 0)
            return None
        first = found.receive(1).tolist()
        began = time.monotonic()
        with pytest.raises(ClusterError, match="worker 1"):
            found.receive(1)
        return first, time.monotonic() - began < 5

    assert together(2, use)[0] == ([0, 1, 2], True)


def test_a_message_is_found_behind_strangers_when_its_sender_has_left():
    ready, left = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:

        def use(found):
            if found.rank == 1:
                ready.wait(10)
                found.send(np.arange(3), 0)
                found.sockets.close()
                return left.set()
            port = found.sockets.pairs._connections._listener.getsockname()[1]
            for _ in range(3):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            ready.set()
            left.wait(10)
            return found.receive(1).tolist()

        assert together(2, use)[0] == [0, 1, 2]


def test_one_that_is_not_waited_for_may_leave():
    def use(found):
        if found.rank == 2:
            return None
        time.sleep(0.1)
        found.send(np.array(found.rank), 1 - found.rank)
        return found.receive(1 - found.rank).item()

    assert together(3, use)[:2] == [1, 0]


@pytest.mark.parametrize("sends", [False, True])
def test_who_hangs_up_in_the_middle_of_a_message_is_named(sends):
    begun = threading.Event()

    def use(found):
        if found.rank == 0:
            begun.set()
            began = time.monotonic()
            found.send(np.zeros(10_000_000), 1) if sends else found.receive(1)
            return time.monotonic() - began
        begun.wait(10)
        time.sleep(0.3)
        if not sends:
            found.sockets.pairs._open(0)
            found.sockets.pairs._opened[0].send(bytes(messages.header(np.zeros(1000), tag=0)) + bytes(1000))  # of 8000
        return None

    error = together(2, use)[0]
    assert isinstance(error, ClusterError) and "worker 1" in error.sentence


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sends", [False, True])
def test_who_is_silent_in_a_message_is_named_after_the_timeout_however_much_others_send(sends):
    done = threading.Event()

    def use(found):
        if found.rank == 2:
            while not done.wait(0.01):
                found.send(np.ones(3), 0)
            return None
        if found.rank == 1:
            done.wait(10)
            return None
        began, computed = time.monotonic(), time.thread_time()
        try:
            found.send(np.zeros(10_000_000), 1) if sends else found.receive(1)
        except ClusterError as error:
            return error.sentence, time.monotonic() - began, time.thread_time() - computed
        finally:
            done.set()

    sentence, seconds, computed = together(3, use, timeout_seconds=1.0)[0]
    assert "silent for 1 s: worker 1" in sentence and "worker 2" not in sentence
    assert 0.9 < seconds < 5 and computed < seconds / 2  # it waits without polling


def test_who_waits_for_a_message_may_be_excused_and_be_told_why_to_give_up():
    def use(found):
        if found.rank == 1:
            time.sleep(1.5)
            found.send(np.array(3), 0)
            time.sleep(0.5)
            found.receive(0)
            return None
        found.sockets.excuse(lambda: True)
        received = found.receive(1).item()
        threading.Timer(0.2, found.sockets.give_up, [ClusterError("the job is given up", "try again")]).start()
        with pytest.raises(ClusterError, match="the job is given up"):
            found.receive(1)
        return received

    assert together(2, use, timeout_seconds=0.5)[0] == 3


@pytest.mark.parametrize("rank", [-1, 1, 2])
def test_a_message_is_for_another_process_of_the_job(rank):
    def use(found):
        if found.rank == 1:
            with pytest.raises(UsageError, match=f"`to` is `{rank}`.* have the ranks `0`"):
                found.send(np.zeros(1), rank)
            with pytest.raises(UsageError, match=f"`from_` is `{rank}`"):
                found.receive(rank)

    together(2, use)
    with pytest.raises(UsageError, match="no other process"):
        groups.Alone().send(np.zeros(1), 0)
    assert groups.Alone().probe() == []


@pytest.mark.exhaustive  # seconds and gigabytes
def test_an_array_of_more_than_two_gibibytes_comes_whole():
    def use(found):
        if found.rank == 0:
            values = np.zeros(2**31 + 8, np.uint8)
            values[-1] = 7
            return found.send(values, 1)
        received = found.receive(0)
        return received.shape, received[-1], received[:-1].any()

    assert together(2, use)[1] == ((2**31 + 8,), 7, False)


def test_a_job_on_this_machine_listens_on_its_loopback_interface_and_others_on_every_interface():
    here = (Task("worker", 0, "localhost:1"), Task("worker", 1, "localhost:2"))
    hosts = (Task("worker", 0, "a:1"), Task("worker", 1, "b:1"))
    listener, host = ports.listen_for(World(0, 2, 0, 2, "TF_CONFIG", here))
    with listener:
        assert host == listener.getsockname()[0] and host in ("127.0.0.1", "::1")
    listener, host = ports.listen_for(World(0, 2, 0, 1, "TF_CONFIG", hosts))
    with listener:
        assert host is None and listener.getsockname()[0] in ("::", "0.0.0.0")
