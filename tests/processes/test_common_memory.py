"""Processes that add up in the memory of their host, when one of them is killed or stopped."""

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path

import pytest

SIZE = 4
TIMEOUT_SECONDS = 3


def add_up_for_ever(rank, pipe):
    """One process; it says when it has begun, and with which error it ends."""
    import numpy as np

    from tfdist.errors import ClusterError
    from tfdist.groups.socket_group import Sockets
    from tfdist.groups.sockets.messages import Mailbox
    from tfdist.jobs.world import World

    def exchange(message):
        pipe.send(message)
        return pipe.recv()

    cluster = {"worker": [f"127.0.0.1:{2000 + index}" for index in range(SIZE)]}
    world = World.detect({"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})})
    sockets, values = Sockets(world, exchange, 10.0, TIMEOUT_SECONDS, Mailbox()), np.full(3_000_000, rank, np.float32)
    try:
        for number in range(10**9):
            assert (sockets.sum(values) == 6).all()
            if number == 3:
                pipe.send("has begun")
    except ClusterError as error:
        pipe.send(error.sentence)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("lost", [0, 3])
def test_the_others_end_with_its_name_and_leave_nothing_behind(how, lost):
    context, before = multiprocessing.get_context("spawn"), set(os.listdir("/dev/shm"))
    pipes = [context.Pipe() for _ in range(SIZE)]
    processes = [context.Process(target=add_up_for_ever, args=(rank, pipes[rank][1])) for rank in range(SIZE)]
    for process in processes:
        process.start()
    try:
        for _ in range(2):  # what they say while they connect
            said = [pipe.recv() for pipe, _ in pipes]
            for pipe, _ in pipes:
                pipe.send(said)
        assert [pipe.recv() for pipe, _ in pipes] == ["has begun"] * SIZE
        assert "memfd:tfdist-" in Path(f"/proc/{processes[1].pid}/maps").read_text()
        os.kill(processes[lost].pid, how)
        began = time.monotonic()
        for rank in set(range(SIZE)) - {lost}:
            assert pipes[rank][0].poll(TIMEOUT_SECONDS + 10)
            assert re.findall(r"worker (\d)", pipes[rank][0].recv()) == [str(lost)]
        assert time.monotonic() - began < TIMEOUT_SECONDS + 8
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert {name for name in set(os.listdir("/dev/shm")) - before if "tfdist" in name} == set()
