"""The likely cause of steps on several replicas that differ from those of one device."""

from __future__ import annotations

from tfdist.interface.strategy import Strategy
from tfdist.verification.report import Entry

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


def explained(strategy: Strategy, entry: Entry) -> tuple[str, str]:
    """The sentence and the hint for the first entry that differs.

    Whatever a model computes, the step of one device is partitioned: what differs is a fault of the partitioner, or of
    a mesh of the user's own.
    """
    if type(strategy.mesh).__module__.partition(".")[0] == "tfdist" and entry.kind != "batch":
        cause = "tfdist divides an operation of the step among the replicas by a wrong rule"
        hint = "this is a fault of tfdist: train with the strategy `single`, and report the layer"
    else:
        cause = f"the strategy `{strategy.name}` divides batches, or adds over its replicas, in another way"
        hint = "this is a fault of the strategy: look at the methods of its `mesh`"
    sentence = (
        f"{_WHAT[entry.kind].format(entry=entry)} differs from one device by {entry.difference:.2g} in step "
        f"{entry.step}, where rounding makes {entry.sensitivity:.2g}; the likely cause: {cause}"
    )
    return sentence, hint
