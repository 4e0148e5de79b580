"""Names the operations of each stage of a model, and puts its variables on the device of the stage.

The forward pass of an operation is traced in a name scope with the numbers of the stage and the micro-batch. When a
tape differentiates an operation, TensorFlow passes the name scope of its forward pass to the gradient function. So the
names in the graph show to which stage an operation belongs, forward or backward, without a special model or tape.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals import keras_stages
from tfdist.pipeline_parallel.plan import Plan
from tfdist.pipeline_parallel.schedule import Task
from tfdist.profiling import stages as stage_names

BACKWARD = "gradient_tape/"  # TensorFlow's prefix for the names of operations that a tape computes


class _ThreadState(threading.local):
    plans: Mapping[int, Plan] = {}
    plan: Plan | None = None  # the plan of the model that runs
    devices: Sequence[str] = ()
    call = 0


_thread = _ThreadState()


@contextlib.contextmanager
def on_stages(plans: Mapping[int, Plan], devices: Sequence[str]) -> Iterator[None]:
    """Within this context, the models of `plans`, by the `id` of their graphs, run on `devices`, one per stage."""
    previous = dict(vars(_thread))
    _thread.plans, _thread.devices = plans, devices
    try:
        with keras_stages.around_operations(_begin, _around):
            yield
    finally:
        vars(_thread).clear()
        vars(_thread).update(previous)


def _begin(functional: Any) -> None:
    if id(functional) in _thread.plans:
        _thread.plan, _thread.call = _thread.plans[id(functional)], 0


def _around(functional: Any, operation: Any, run: Callable[[], Any]) -> Any:
    plan = _thread.plan
    if plan is None or keras_stages.functional_of(operation) is not None:  # its inner operations are passed here too
        return run()
    if _thread.call >= len(plan.calls) or plan.calls[_thread.call].operation is not operation:
        return run()  # an operation of another model
    stage = plan.stage_of(_thread.call)
    _thread.call += 1
    with tf.device(_thread.devices[stage]), tf.name_scope(stage_names.scope(stage, 0)):
        return run()


def scope_of(stage: int, task: Task) -> str:
    """Returns the name scope for additional operations of a stage's task, besides those of the model and the tape."""
    scope = stage_names.scope(stage, task.micro_batch)
    return BACKWARD + scope if task.direction == "backward" else scope


def task_of(name: str) -> tuple[int, Task] | None:
    """Returns the stage and the task of an operation by its name; `None` if it belongs to no task."""
    numbers = stage_names.stage_and_micro_batch(name)
    if numbers is None:
        return None
    stage, micro_batch = numbers
    return stage, Task("backward" if BACKWARD in name else "forward", micro_batch)


def place(plan: Plan, devices: Sequence[str], model: Any) -> None:
    """Moves the variables of each stage, and their slots, to its device."""
    moved = False
    for stage, device in enumerate(devices):
        for variable in plan.variables_of(stage):
            moved |= keras_stages.move(variable, device)
    keras_stages.move_slots(model)
    if moved:
        keras_stages.forget_functions(model)
