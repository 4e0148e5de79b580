"""Whether the processes of a job still have the same weights: they compare checksums at the end of each epoch.

All processes make the same assignments of the same values, so that nothing is sent but gradients. What one of them
changes alone, as a callback does that sets the learning rate where it is the chief, would stay there in silence, and so
would a processor that rounds otherwise.
"""

from __future__ import annotations

import warnings
from typing import Any

from tfdist.checkpointing import state as training_state
from tfdist.errors import DifferenceWarning
from tfdist.groups import parts
from tfdist.interface import shared_variables
from tfdist.jobs import consensus


def mend(strategy: Any, model: Any, epoch: int) -> None:
    """Gives all processes the variables of the chief if they differ at the end of an `epoch`, and says so.

    All processes of a strategy that partitions steps call it.
    """
    if not strategy.as_one_device or strategy.mesh is None or strategy.world.world_size == 1:
        return
    groups = training_state.variables(model)
    held = [one for one in (*groups["model"], *groups["optimizer"]) if parts.part_of(one) is None]
    mine = shared_variables.checksum(held)
    if len(set(consensus.all_gather_object(strategy, mine, "compares the weights of an epoch"))) == 1:
        return
    each = [shared_variables.checksum([variable]) for variable in held]
    of_all = consensus.all_gather_object(strategy, each, "finds the weights that differ")
    different = [variable.path for variable, *sums in zip(held, *of_all, strict=True) if len(set(sums)) > 1]
    strategy.broadcast_variables(held)
    if strategy.world.is_chief:
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        warnings.warn(
            f"The processes of the job ended epoch {epoch + 1} with different values of `{different[0]}`{others}; all "
            "go on with those of the chief\n\n"
            "hint: a callback that changes a variable, such as the learning rate, must do so in every process",
            DifferenceWarning,
            stacklevel=2,
        )
