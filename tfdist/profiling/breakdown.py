"""The time of a training step by activity, by layer and by type of operation, and what bounds the step.

At each moment, the first activity in this list that applies counts: the step waits for its next batch (input); an
operation computes; tensors are exchanged with other processes or devices (communication); the step waits for Python, a
thread or another process. Communication is thus only the part that computation does not hide.

Synopsis:

    >>> steps = [(0.0, 10.0)]
    >>> operations = [Operation("conv:Conv2D", 1.0, 5.0), Operation("grads:HorovodAllreduce", 4.0, 8.0)]
    >>> step = of_process(operations, fetches=[(0.0, 1.0)], steps=steps)
    >>> step.input_seconds, step.compute_seconds, step.communication_seconds, step.waiting_seconds
    (1.0, 4.0, 3.0, 2.0)
    >>> bound_of(step.shares())
    'compute'

The costs of operations by layer and by type are derived from the names of the operations. Keras opens the scope of a
layer for each call, and TensorFlow appends a number to a scope that already exists: when a step is traced,
`cnn_1/conv2d_1` is the layer `conv2d` of the model `cnn`. In this case the last number is removed.

    >>> layer_of("gradient_tape/cnn_1/conv2d_1_2/convolution/Conv2DBackpropFilter", "Conv2DBackpropFilter")
    'conv2d_1, backward'
    >>> layer_of("adam/ResourceApplyAdam_4", "ResourceApplyAdam")
    'update of the weights'
    >>> layer_of("while/body/_1/gradient_tape/while/cnn_1/dense_1/MatMul", "MatMul")
    'dense, backward'
    >>> kind_of("_MklNativeFusedConv2D")
    'FusedConv2D'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from tfdist.profiling.stages import Span, covered

# The names that `tfdist.groups` gives to operations that exchange tensors in Python.
EXCHANGE, MESSAGE = "tfdist_exchange", "tfdist_message"
# These names, and the types of TensorFlow's and Horovod's operations that exchange tensors.
_COMMUNICATION = re.compile(f"{EXCHANGE}|{MESSAGE}|:(Horovod|Collective|Nccl|_Send|_Recv|_HostSend|_HostRecv)")
_BEGINS, _ENDS = "ExecutorState::ProcessAsync::Start", "ExecutorState::ProcessAsync::Done"

_NUMBER = re.compile(r"_\d+$")
# The prefix of the names of operations in a loop.
_LOOP = re.compile(r"^.*\bwhile/(?:body/_\d+/)?(?:while/)?")

LAYERS = "`tfdist profile RUN` lists the layers that take longest"
FIRST_TO_TRY = {
    "compute": "let more devices share the batch, use `--dtype-policy mixed_bfloat16` where the hardware has it, or a "
    "smaller model",
    "communication": "a larger global batch, which exchanges gradients less often; `--compression bf16`; fewer and "
    "larger processes; a faster link",
    "input": "prepare examples once: `cache` and `prefetch`, parallel `map`, smaller pictures, files on a faster disk",
    "waiting": "a larger batch or fewer replicas: the operations are short compared to the time that Python, threads "
    "and other processes take between them; tracing makes that time longer",
}


class Operation(NamedTuple):
    """An execution of an operation: its name and type as `name:Type`, and its begin and end in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Breakdown:
    """The seconds of each activity in a step, as the mean over the steps."""

    compute_seconds: float
    communication_seconds: float
    input_seconds: float
    waiting_seconds: float

    @property
    def step_seconds(self) -> float:
        """The duration of a step."""
        return sum(astuple(self))

    def shares(self) -> dict[str, float]:
        """Returns the share of each activity in a step, 0 to 1."""
        kinds = ("compute", "communication", "input", "waiting")
        return {kind: getattr(self, f"{kind}_seconds") / self.step_seconds for kind in kinds}


@dataclass(frozen=True)
class OpCost:
    """The cost of one op in a trace.

    Attributes:
        name: the name in the graph, the same for all replicas.
        type: the TensorFlow type; `Dataset` for a stage of the input pipeline.
        share: the share of the self time of all ops, 0 to 1.
        self_microseconds: the time in the op itself, without the ops it calls, over the whole trace and all replicas.
    """

    name: str
    type: str
    share: float
    self_microseconds: float


def is_communication(name: str) -> bool:
    """Whether an operation `name:Type` exchanges tensors with other processes or devices."""
    return _COMMUNICATION.search(name) is not None


def of_process(operations: Sequence[Operation], fetches: Sequence[Span], steps: Sequence[Span]) -> Breakdown | None:
    """Returns the breakdown of a process's `steps`; `None` if there are no steps, or no computation in any.

    Args:
        operations: the operations that ran, including those outside of steps.
        fetches: the spans in which it waited for a batch.
        steps: the begin and end of each step in seconds.
    """
    exchanges = [(operation.begin, operation.end) for operation in operations if is_communication(operation.name)]
    computing = [(operation.begin, operation.end) for operation in operations if not is_communication(operation.name)]
    total = [0.0, 0.0, 0.0, 0.0]
    for begin, end in steps:
        waits = covered(fetches, begin, end)
        busy = covered([*fetches, *computing], begin, end)
        active = covered([*fetches, *computing, *exchanges], begin, end)
        seconds = (busy - waits, active - busy, waits, end - begin - active)
        total = [sum(pair) for pair in zip(total, seconds, strict=True)]
    if not steps or not total[0]:
        return None
    return Breakdown(*(seconds / len(steps) for seconds in total))


def of_all(breakdowns: Sequence[Breakdown]) -> Breakdown | None:
    """Returns the mean over processes; `None` if there are none."""
    if not breakdowns:
        return None
    return Breakdown(*(sum(column) / len(breakdowns) for column in zip(*map(astuple, breakdowns), strict=True)))


def operations_of(events: Sequence[Mapping[str, Any]]) -> list[Operation]:
    """Returns the operations among the trace viewer's events, asynchronous ones from their start to their end."""
    operations = []
    begun: dict[tuple[str, str], list[float]] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        arguments, begin = event.get("args", {}), event["ts"] / 1e6
        if event["name"] in (_BEGINS, _ENDS):
            name = f"{arguments.get('name')}:{arguments.get('kernel_type')}"
            key = (name, str(arguments.get("step_id")))
            if event["name"] == _BEGINS:
                begun.setdefault(key, []).append(begin)
            elif begun.get(key):
                operations.append(Operation(name, begun[key].pop(0), begin))
        # Operations of the input pipeline, which runs in parallel to the steps, belong to no group.
        elif "group_id" in arguments and (name := arguments.get("long_name", "")).endswith(f":{event['name']}"):
            operations.append(Operation(name, begin, begin + event.get("dur", 0) / 1e6))
    return operations


def as_text(breakdown: Breakdown) -> str:
    """Returns the breakdown as a line of text."""
    parts = ", ".join(f"{share:.0%} {kind}" for kind, share in breakdown.shares().items())
    return f"A step of {breakdown.step_seconds * 1e3:.2f} ms: {parts}"


def bound_of(shares: Mapping[str, float]) -> str:
    """Returns the activity with the largest share."""
    return max(shares, key=lambda kind: shares[kind])


def advice(shares: Mapping[str, float], layers: str = LAYERS) -> str:
    """Returns a sentence on what bounds the step, and one on what to try first.

    Args:
        shares: the share of each activity.
        layers: where the layers are listed that take longest, which matters if the step is bound by compute.
    """
    kind = bound_of(shares)
    what = "The step is bound by waiting (latency)" if kind == "waiting" else f"The step is bound by {kind}"
    further = f"; {layers}" if kind == "compute" else ""
    return f"{what}: {shares[kind]:.0%} of its time.\nTry first: {FIRST_TO_TRY[kind]}{further}."


def layer_of(name: str, kind: str) -> str:
    """Returns the layer of the operation `name` of the type `kind`, with its direction, or else its purpose."""
    if is_communication(f"{name}:{kind}"):
        return "communication"
    if kind == "Dataset" or kind.startswith("Iterator"):
        return "input pipeline"
    if "Apply" in kind:
        return "update of the weights"
    backward = "gradient_tape/" in name
    first, *inside = _LOOP.sub("", name).removeprefix("gradient_tape/").split("/")
    if first == "compile_loss":
        return "loss"
    if len(inside) < 2:  # not in the scope of a layer
        return "other operations of the step"
    layer = inside[0]
    if _NUMBER.search(first):
        layer = _NUMBER.sub("", layer)
    return f"{layer}, {'backward' if backward else 'forward'}"


def kind_of(kind: str) -> str:
    """Returns the type of an operation without the prefix of its kernel's library."""
    return re.sub(r"^_?(Mkl)?(Native)?", "", kind)


def by_layer(ops: Iterable[OpCost]) -> dict[str, float]:
    """Returns the share of each layer and direction, 0 to 1, the largest first."""
    return _summed(ops, lambda op: layer_of(op.name, op.type))


def by_kind(ops: Iterable[OpCost]) -> dict[str, float]:
    """Returns the share of each type of operation, 0 to 1, the largest first."""
    return _summed(ops, lambda op: kind_of(op.type))


def _summed(ops: Iterable[OpCost], key: Callable[[OpCost], str]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for op in ops:
        shares[key(op)] = shares.get(key(op), 0.0) + op.share
    return dict(sorted(shares.items(), key=lambda item: item[1], reverse=True))
