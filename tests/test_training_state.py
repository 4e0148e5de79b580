"""Metrics of which each process has a part: whatever number of processes goes on, they add up to what was saved."""

import numpy as np
import pytest

from tfdist.checkpointing import state as training_state
from tfdist.checkpointing.format import Entry
from tfdist.jobs.world import World


class Peer:
    """One process of several, as far as a checkpoint asks."""

    metrics_by_process = True

    def __init__(self, rank, size):
        self.world = World(rank, size, rank, size, "a test")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("written_by", [1, 2, 3, 4])
def test_the_parts_of_all_processes_add_up_to_what_was_saved(written_by, size):
    parts = np.arange(1.0, 1 + 2 * written_by).reshape(written_by, 2)
    if written_by == 1:  # a single process, maybe of another strategy
        saved = Entry("metrics", "total", parts[0])
    else:
        saved = Entry("metrics", "total", parts, by_replica=True)
    weight = Entry("model", "kernel", np.ones(2))
    restored = [training_state.local_entries([saved, weight], Peer(rank, size)) for rank in range(size)]
    totals = [total.value.sum(axis=0) if total.by_replica else total.value for total, _ in restored]
    np.testing.assert_array_equal(sum(totals), parts.sum(axis=0))
    assert all(kept is weight for _, kept in restored)
