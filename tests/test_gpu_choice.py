"""Which GPUs a process uses, on machines that only their list of devices stands for: `tests/gpu` runs on real ones."""

from __future__ import annotations

import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface import devices as _devices
from tfdist.jobs.world import World


class Machine:
    """The part of `tf.config` that says which GPUs there are, for a machine with `count` of them."""

    def __init__(self, monkeypatch, count, *, started=False, logical=1):
        self.gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(count)]
        self.visible = list(self.gpus)
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(self.gpus))
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: list(self.visible))
        monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: setattr(self, "visible", devices))
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: [None] * logical)
        monkeypatch.setattr(_devices.tensorflow_internals, "runtime_started", lambda: started)

    def of(self, *, local_rank=0, processes=1, **environment):
        """The numbers of the GPUs of a process."""
        world = World(local_rank, processes, local_rank, processes)
        return [self.gpus.index(gpu) for gpu in _devices.gpus_of_process(world, environment)]


@pytest.mark.parametrize(("gpus", "processes"), [(8, 8), (8, 3), (2, 2), (8, 4)])
def test_the_processes_of_a_machine_have_different_gpus_by_their_local_ranks(monkeypatch, gpus, processes):
    machine = Machine(monkeypatch, gpus)
    each = [machine.of(local_rank=rank, processes=processes) for rank in range(processes)]
    assert [len(own) for own in each] == [gpus // processes] * processes
    assert len({gpu for own in each for gpu in own}) == gpus // processes * processes


@pytest.mark.parametrize(
    "environment", [{"SLURM_GPUS_PER_TASK": "2"}, {"TFDIST_OWN_GPUS": "1", "CUDA_VISIBLE_DEVICES": "4,5"}]
)
def test_gpus_that_a_launcher_has_given_to_each_process_are_not_divided_again(monkeypatch, environment):
    assert Machine(monkeypatch, 2).of(local_rank=1, processes=2, **environment) == [0, 1]


def test_a_script_may_give_each_process_its_gpu(monkeypatch):
    assert Machine(monkeypatch, 1).of(local_rank=5, processes=8, CUDA_VISIBLE_DEVICES="5") == [0]


def test_gpus_that_the_users_code_has_chosen_are_kept(monkeypatch):
    machine = Machine(monkeypatch, 8)
    machine.visible = [machine.gpus[3]]
    assert machine.of(local_rank=3, processes=8) == [3]


def test_fewer_gpus_than_processes_are_refused_in_a_sentence(monkeypatch):
    with pytest.raises(UsageError, match=r"8 processes of the job are on this machine, and it has 2 GPUs") as error:
        Machine(monkeypatch, 2).of(processes=8)
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in error.value.hint


def test_fewer_gpus_than_processes_are_shared_if_memory_may_grow(monkeypatch):
    machine = Machine(monkeypatch, 2)
    shared = [machine.of(local_rank=rank, processes=5, TF_FORCE_GPU_ALLOW_GROWTH="true") for rank in range(5)]
    assert shared == [[0], [1], [0], [1], [0]]
    assert _devices.gpus_are_shared(World(0, 5, 0, 5), {})
    assert not _devices.gpus_are_shared(World(0, 2, 0, 2), {})
    assert not _devices.gpus_are_shared(World(0, 5, 0, 5), {"SLURM_GPUS_PER_TASK": "2"})


def test_a_machine_without_gpus_has_none_to_give(monkeypatch):
    assert Machine(monkeypatch, 0).of(local_rank=1, processes=2) == []


def test_a_process_sees_its_own_gpus_alone(monkeypatch):
    machine = Machine(monkeypatch, 4)
    assert _devices.use_only_gpus(machine.gpus[2:]) == ["GPU:0", "GPU:1"]
    assert machine.visible == machine.gpus[2:]
    assert _devices.use_only_gpus(machine.gpus[2:]) == ["GPU:0", "GPU:1"]  # a second strategy of the same process


def test_gpus_cannot_be_hidden_from_a_tensorflow_that_has_started(monkeypatch):
    machine = Machine(monkeypatch, 4, started=True)
    with pytest.raises(UsageError, match="already started with all GPUs"):
        _devices.use_only_gpus(machine.gpus[:1])
    assert len(_devices.use_only_gpus(machine.gpus)) == 4


@pytest.mark.parametrize(
    ("wanted", "called", "seen"),
    [(1, ["GPU:0"], [0]), ("GPU:2", ["GPU:0"], [2]), (("/device:gpu:3",), ["GPU:0"], [3]), ("CPU:0", "CPU:0", [])],
)
def test_an_exclusive_device_hides_the_other_gpus(monkeypatch, wanted, called, seen):
    machine = Machine(monkeypatch, 4)
    assert _devices.hide_other_gpus(wanted) == called
    assert [machine.gpus.index(gpu) for gpu in machine.visible] == seen


@pytest.mark.parametrize("wanted", ["GPU:4", "GPU", 2])
def test_what_cannot_be_one_device_hides_nothing(monkeypatch, wanted):
    machine = Machine(monkeypatch, 4)
    assert _devices.hide_other_gpus(wanted) == wanted
    assert machine.visible == machine.gpus


def test_logical_devices_count_as_devices(monkeypatch):
    Machine(monkeypatch, 2, logical=2)
    assert _devices.choose(None) == ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]
    with pytest.raises(UsageError, match="`devices` is 5, and TensorFlow has 4 GPU devices"):
        _devices.choose(5)


def test_an_exclusive_cpu_trains_as_any_other():
    assert tfdist.strategy("single", exclusive=True).devices == ["CPU:0"]
    with pytest.raises(UnknownNameError):
        tfdist.strategy("single", exclusive=True, devices="GPU:1")
