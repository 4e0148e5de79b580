"""The checks and broadcasts before the first step: all processes train the same model, on the same data and seed."""

from __future__ import annotations

import math
from typing import Any

from tfdist.data.input.passes import Passes
from tfdist.interface import randomness
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_patches
from tfdist.internals.keras import tree
from tfdist.jobs import consensus
from tfdist.loop import building

# The attribute of a model that holds the number of its next pass over the data.
_NEXT_PASS = "_tfdist_next_pass"


def settle_seed(strategy: Strategy, callbacks: Any) -> None:
    """Settles the seed of the order of examples, unless the user gave one, and agrees on it with all processes.

    A run that is resumed takes the seed of its checkpoint. Otherwise the seed follows, at the strategy's first
    training, from Python's `random`, which the user may have seeded after the strategy was made.
    """
    seed = None
    if strategy.world.is_chief and not strategy.seed_is_given:
        given = getattr(callbacks, "callbacks", None) or tree.flatten(callbacks)
        resuming = [c for c in keras_patches.with_wrapped(given) if hasattr(c, "seed_to_resume_with")]
        seed = next((found for c in resuming if (found := c.seed_to_resume_with()) is not None), None)
        if seed is None and not strategy.seed_is_settled:
            seed = randomness.seed_of_random()
    seed = consensus.broadcast_from_chief(strategy, seed)
    if seed is not None:
        strategy.seed, strategy.seed_is_settled = seed, True


def require_alike(strategy: Strategy, model: Any, passes: Passes, epochs: range) -> None:
    """Compares the model, the optimizers, the loss and the sizes of the data over the processes.

    Raises:
        DisagreementError: something differs.
    """
    if strategy.world.world_size > 1:
        consensus.require_equal(strategy, _facts(model, passes, epochs))


def _facts(model: Any, passes: Passes, epochs: range) -> dict[str, Any]:
    optimizers = keras_internals.optimizers(model)
    return {
        "the model's parameters": sum(math.prod(v.shape) for v in model.variables),
        "the model": consensus.fingerprint([(list(v.shape), v.dtype, v.trainable) for v in model.variables]),
        "the layers": consensus.fingerprint(keras_internals.layers(model)),
        "the optimizer": ", ".join(optimizer.name for optimizer in optimizers) or None,
        "its settings": consensus.fingerprint([_config(optimizer) for optimizer in optimizers]),
        "the loss": tree.map_structure(_named, getattr(model, "loss", None)),
        "the examples in an epoch": passes.examples,
        "the batches in an epoch": passes.num_batches,
        "the batch size": passes.feed.batch_size,
        "the epochs": f"{epochs.start} to {epochs.stop}",
    }


def _named(thing: Any) -> Any:
    return thing if isinstance(thing, str | None) else getattr(thing, "name", None) or type(thing).__name__


def _config(optimizer: Any) -> Any:
    """An optimizer's settings without its name, which contains a count of the optimizers of the process."""
    return {name: value for name, value in optimizer.get_config().items() if name != "name"}


def begin_alike(strategy: Strategy, model: Any, callbacks: Any, initial_epoch: int) -> tuple[int, int | None, int]:
    """Returns the epoch, batch and pass to begin at, and broadcasts the variables of the chief, which reads files."""
    begin = (
        keras_internals.initial_epoch(model) or initial_epoch,
        _resume_batch(callbacks),
        getattr(model, _NEXT_PASS, 0),
    )
    begin = tuple(consensus.broadcast_from_chief(strategy, begin))
    building.broadcast(strategy, model)
    return begin


def _resume_batch(callbacks: Any) -> int | None:
    """The batch of the first epoch at which a callback resumes a run; `None` if no callback does."""
    found = [getattr(callback, "resume_batch", None) for callback in callbacks.callbacks]
    return max((batch for batch in found if batch is not None), default=None)


def note_next_pass(model: Any, number: int) -> None:
    """The next training of `model` begins with pass `number` over its data."""
    # Past Keras' attribute tracking, so that it is not saved with the model.
    object.__setattr__(model, _NEXT_PASS, number)
