"""Which GPUs the processes of a `parameter_server` job use, on machines that only a list of devices stands for."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.jobs.tf_config import Task
from tfdist.jobs.world import World
from tfdist.parameter_server import strategy

TASKS = (
    Task("chief", 0, "one:2000"),
    Task("worker", 0, "one:2001"),
    Task("worker", 1, "one:2002"),
    Task("worker", 2, "two:2001"),
    Task("ps", 0, "one:2003"),
)


def world(rank):
    return World(rank, len(TASKS), source="TF_CONFIG", tasks=TASKS)


def gpus(count):
    return [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(count)]


@pytest.mark.parametrize(("rank", "own"), [(0, []), (1, [0]), (2, [2]), (3, [0]), (4, [])])
def test_each_worker_has_one_gpu_of_its_machine_and_chief_and_servers_have_none(rank, own):
    machine = gpus(4)
    assert strategy.gpus_of(world(rank), machine, {}) == [machine[index] for index in own]


def test_a_worker_whose_launcher_has_given_it_two_gpus_uses_the_first():
    machine = gpus(2)
    given = {"TFDIST_OWN_GPUS": "1", "CUDA_VISIBLE_DEVICES": "6,7"}
    assert strategy.gpus_of(world(2), machine, given) == machine[:1]


def test_fewer_gpus_than_workers_are_refused_or_shared_if_asked():
    with pytest.raises(UsageError, match="2 processes of the job are on this machine, and it has 1 GPU"):
        strategy.gpus_of(world(2), gpus(1), {})
    assert len(strategy.gpus_of(world(2), gpus(1), {"TF_FORCE_GPU_ALLOW_GROWTH": "true"})) == 1


def test_a_server_is_told_which_gpus_it_has():
    assert strategy.server_config(world(4), []).device_count["GPU"] == 0
    config = strategy.server_config(world(2), gpus(4)[2:3])
    assert config.device_count["GPU"] == 1
    assert config.gpu_options.visible_device_list == "2"


def test_workers_with_and_without_a_gpu_are_refused_together():
    names = [f"/job:worker/replica:0/task:{index}/device:GPU:0" for index in range(3)]
    strategy.require_equal_gpus(world(0), names)
    strategy.require_equal_gpus(world(0), [])
    with pytest.raises(UsageError, match=r"worker 1 \(one:2002\): 0, worker 2 \(two:2001\): 1") as error:
        strategy.require_equal_gpus(world(0), [names[0], names[2]])
    assert "CUDA_VISIBLE_DEVICES" in error.value.hint
