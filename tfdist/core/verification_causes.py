"""The likely causes of steps on several replicas that differ from one device, each with a way that is equal."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfdist.core.verification_report import Entry
from tfdist.internals import keras as keras_internals
from tfdist.internals.keras import tree

# Of a strategy that partitions the step of one device, whatever the model computes.
_OF_THE_PARTITIONER = (
    "tfdist divides an operation of the step among the replicas by a wrong rule",
    "this is a fault of tfdist: train with the strategy `single`, and report the layer",
)


def explained(strategy: str, model: Any, entry: Entry, partitioned: bool) -> tuple[str, str]:
    """The sentence and the hint for the first entry that differs.

    Args:
        strategy: the name of the strategy.
        model: whose steps were compared.
        entry: what differs first.
        partitioned: the strategy partitions the step of one device.
    """
    cause, hint = _OF_THE_PARTITIONER if partitioned else _cause(strategy, model, entry)
    sentence = (
        f"{_WHAT[entry.kind].format(entry=entry)} differs from one device by {entry.difference:.2g} in step "
        f"{entry.step}, where rounding makes {entry.sensitivity:.2g}; the likely cause: {cause}"
    )
    return sentence, hint


_WHAT = {
    "batch": "The batch that a step is given, in `{entry.name}`,",
    "output": "The output of the layer `{entry.layer}`",
    "added loss": "A loss that the layer `{entry.layer}` adds",
    "loss": "The loss `{entry.name}`",
    "whole loss": "The result of `compute_loss` of the model `{entry.layer}`",
    "gradient": "The gradient of `{entry.name}`, of the layer `{entry.layer}`,",
    "state": "The variable `{entry.name}`, of the layer `{entry.layer}`,",
    "weight": "The weight `{entry.name}`, of the layer `{entry.layer}`,",
    "optimizer": "The optimizer's variable `{entry.name}`",
    "log": "The value `{entry.name}` in the logs",
}


def _cause(strategy: str, model: Any, entry: Entry) -> tuple[str, str]:
    """The likely cause of a difference of this kind, and a way that is equal."""
    layer = next((one for one in keras_internals.all_layers(model) if one.name == entry.layer), None)
    if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized:
        return (
            f"`{entry.layer}` normalizes each replica's part of the batch by itself",
            "use `BatchNormalization(synchronized=True)`",
        )
    if entry.kind == "batch":
        return f"the strategy `{strategy}` divides batches, or adds over its replicas, in another way", _FAULT
    if _is_of_keras(model, layer if entry.kind == "output" else None):
        return (
            f"Keras alone computes it, so that the strategy `{strategy}` has other variables on a replica, or adds "
            "over its replicas in another way",
            _FAULT,
        )
    if entry.kind == "log":
        return _cause_of_log(model, entry)
    is_sum = entry.replicas_over_one < _A_SUM
    part = "is a sum over a replica's part of the batch" if is_sum else "depends on the whole batch"
    step = "`train_step`" if keras_internals.has_own_step(model, "train") else "the model"
    cause, hint = _CAUSES[entry.kind]
    return cause.format(part=part, step=step), hint


def _is_of_keras(model: Any, layer: Any) -> bool:
    """Whether Keras defines all that a step of `model` computes, or all of `layer`, without random numbers."""
    parts = keras_internals.all_layers(layer or model)
    if layer is None:
        parts += [*tree.flatten(getattr(model, "loss", None)), *keras_internals.metrics_of(model)]
    return not any(_is_of_user(one) or hasattr(one, "seed_generator") for one in parts)


def _is_of_user(thing: Any) -> bool:
    """Whether a layer, a loss or a metric is of a class, or computes a function, that Keras does not define."""
    if thing is None or isinstance(thing, str):
        return False
    defined = [thing if inspect.isfunction(thing) else type(thing)]
    defined += [one for name in ("function", "fn", "_fn", "activation") if callable(one := getattr(thing, name, None))]
    return not all(map(keras_internals.is_of_keras, defined))


_FAULT = "this is a fault of the strategy: look at its `run`, and at `all_reduce` and `all_gather` of its replicas"
# The largest ratio of a sum over a part of a batch to the sum over the batch, roughly.
_A_SUM = 0.75
_GATHER = "compute it of `tfdist.gather(...)` or of sums by `tfdist.all_reduce(...)`"
_OF_LOSS = "the loss {part}, and is not a mean of what each example gives", f"average it; or {_GATHER}"
_OF_STATE = (
    "it is set from a sum over a replica's part of the batch, or from something else that is not a mean",
    "set it from `tfdist.all_reduce(...)` of the sum",
)
_CAUSES = {
    "output": (
        "the layer computes an example's output from other examples of its part of the batch, or draws random numbers "
        "that cannot be compared",
        _GATHER,
    ),
    "added loss": ("what is given to `add_loss` {part}, and not a mean over its examples", f"average it; or {_GATHER}"),
    "loss": _OF_LOSS,
    "whole loss": _OF_LOSS,
    "gradient": (
        "the loss that {step} differentiates {part}, and is not a mean over its examples",
        f"average it (`tf.reduce_mean`); or {_GATHER}",
    ),
    "state": _OF_STATE,
    "weight": _OF_STATE,
    "optimizer": ("the optimizer is given something that only a replica's part of the batch says", _GATHER),
}


def _cause_of_log(model: Any, entry: Entry) -> tuple[str, str]:
    metric = next((one for one in keras_internals.metrics_of(model) if one.name == entry.name.split("/")[0]), None)
    if metric is None:
        return f"`{entry.name}` is a number that `train_step` computes of a replica's part of the batch", (
            "return what is a mean over the examples, or the result of a metric"
        )
    if getattr(metric, "additive", False) or getattr(getattr(metric, "_fn", None), "additive", False):
        return (
            f"the metric `{entry.name}` says `additive = True`, and its state is no sum over the examples",
            "leave `additive` out: the metric is then computed on the global batch",
        )
    return (
        f"the metric `{entry.name}` is given a number that was computed of a replica's part of the batch",
        "give it the values of the examples, or use `keras.metrics.Mean` for a mean over the batch",
    )
