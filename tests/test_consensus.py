"""What processes agree on; here between processes of which each knows what all of them say."""

import json
from typing import ClassVar

import numpy as np
import pytest

from tfdist.errors import DisagreementError
from tfdist.jobs import consensus
from tfdist.jobs.world import World


class Peers:
    """The job as process 0 sees it: `values` of all processes, by rank, are said in one exchange."""

    metrics_by_process = False
    servers: ClassVar = {}

    def __init__(self, values, doings=None):
        cluster = {"worker": [f"node{rank}:2222" for rank in range(len(values))]}
        task = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        self.world = World.detect({"TF_CONFIG": json.dumps(task)})
        self._values, self._doings = values, doings

    def exchange(self, message):
        doings = self._doings or [json.loads(message)[0]] * len(self._values)
        return [json.dumps(pair).encode() for pair in zip(doings, self._values, strict=True)]


def test_the_values_come_by_rank():
    assert consensus.all_gather_object(Peers([1, [2], 1]), 1) == [1, [2], 1]


def test_the_next_call_is_the_shortest_and_one_process_stops_all():
    peers = Peers([[5, False, "a"], [3, False, "a"], [5, True, "a"]])
    assert consensus.next_call(peers, 5, False, "a") == (3, True)


def test_two_and_three_processes_are_named_with_their_values():
    with pytest.raises(DisagreementError, match=r"batches \(worker 0 \(node0:2222\): a, worker 1 \(node1:2222\): b\)"):
        consensus.next_call(Peers([[1, False, "a"], [1, False, "b"]]), 1, False, "a")
    named = r"\(worker 0 \(node0:2222\) and worker 2 \(node2:2222\): a, worker 1 \(node1:2222\): b\)"
    with pytest.raises(DisagreementError, match=f"different arrays {named}"):
        consensus.require_equal_fingerprints(Peers(["a", "b", "a"]), "arrays", "a")


def test_of_many_processes_the_groups_with_equal_values_are_named():
    fingerprints = ["a"] * 512
    fingerprints[7] = "b"
    named = r"\(ranks 0 to 6 and 8 to 511: a, worker 7 \(node7:2222\): b\)"
    with pytest.raises(DisagreementError, match=named):
        consensus.require_equal_fingerprints(Peers(fingerprints), "arrays", "a")
    facts = [{"seed": str(rank % 2), "lr": "1"} for rank in range(512)]
    named = "on `seed`: ranks 0, 2, 4, 6, 8, 10, 12, 14 and 248 more have `0`, ranks 1, 3, .* and 248 more have `1`"
    with pytest.raises(DisagreementError, match=named):
        consensus.require_equal(Peers(facts), {"seed": 0, "lr": 1})


def test_of_many_different_values_the_first_ones_are_named():
    with pytest.raises(DisagreementError) as found:
        consensus.require_equal_fingerprints(Peers(list(map(str, range(512)))), "arrays", "0")
    assert "worker 7 (node7:2222): 7, and there are 504 more values)" in found.value.sentence


def test_processes_that_do_different_things_are_told_apart():
    doings = ["compares its data", "is about to run steps", "compares its data"]
    with pytest.raises(
        DisagreementError, match=r"worker 0 .* and worker 2 .*: compares its data, worker 1 .*: is about"
    ):
        consensus.all_gather_object(Peers([0, 0, 0], doings), 0, "compares its data")


def test_arrays_of_another_shape_or_dtype_are_other_data_although_their_bytes_are_the_same():
    values = np.arange(6, dtype=np.int32)
    different = [values, values.reshape(2, 3), values.reshape(3, 2), values.view(np.float32)]
    assert len({consensus.fingerprint_of_arrays([array]) for array in different}) == 4
    assert consensus.fingerprint_of_arrays([values.copy()]) == consensus.fingerprint_of_arrays([values])
