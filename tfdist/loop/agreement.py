"""What must be equal in all processes of a job before they train: the model, optimizer, loss, data and own code.

A difference would train something that no process was asked for: gradients of different losses would be summed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any

from tfdist.data.input.feed import DataPasses
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals.keras import tree
from tfdist.jobs import consensus

# Packages whose versions are compared when the processes meet.
COMPARED_PACKAGES = ("tfdist", "tensorflow", "keras")


def require_equal_training(strategy: Strategy, model: Any, passes: DataPasses, epochs: range) -> None:
    """Requires that all processes have the same model, optimizers and loss, and the same sizes of the data.

    Raises:
        DisagreementError: they differ; raised in every process, with the values of all processes.
    """
    if strategy.world.world_size == 1:
        return
    optimizers, losses = keras_internals.optimizers(model), getattr(model, "loss", None)
    # Without the name, which counts the optimizers of the process.
    settings = [{k: v for k, v in optimizer.get_config().items() if k != "name"} for optimizer in optimizers]
    facts = {
        "the model's parameters": sum(math.prod(v.shape) for v in model.variables),
        "the model": consensus.fingerprint([(list(v.shape), v.dtype, v.trainable) for v in model.variables]),
        "the layers": consensus.fingerprint(keras_internals.layers(model)),
        "the optimizer": ", ".join(optimizer.name for optimizer in optimizers) or None,
        "its settings": consensus.fingerprint(settings),
        "the loss": tree.map_structure(_name_of_loss, losses),
        "the settings of the loss": consensus.fingerprint(list(map(keras_internals.settings, tree.flatten(losses)))),
        "the examples in an epoch": passes.examples,
        "the batches in an epoch": passes.num_batches,
        "the batch size": passes.feed.batch_size,
        "the epochs": f"{epochs.start} to {epochs.stop}",
    }
    consensus.require_equal(strategy, facts | code_of_user([*keras_internals.parts(model), *tree.flatten(losses)]))


def _name_of_loss(loss: Any) -> Any:
    return loss if isinstance(loss, str | None) else getattr(loss, "name", None) or type(loss).__name__


def code_of_user(objects: Iterable[Any]) -> dict[str, str]:
    """Hashes of the source of the functions among `objects`, and of the classes of the others, by their names.

    Code of Keras, TensorFlow and tfdist is left out, and code whose source is not known.
    """
    kinds = dict.fromkeys(
        kind for part in objects for kind in ([part] if inspect.isfunction(part) else type(part).__mro__)
    )
    of_user = [kind for kind in kinds if kind.__module__.partition(".")[0] not in COMPARED_PACKAGES]
    sources = {f"the code of {kind.__qualname__}": list(_sources(kind)) for kind in of_user}
    return {name: consensus.fingerprint(source) for name, source in sources.items() if source}


def _sources(kind: Any) -> Iterator[str]:
    """The source of a function, or of the methods of a class."""
    functions = [kind] if inspect.isfunction(kind) else [getattr(value, "fget", value) for value in vars(kind).values()]
    for function in functions:
        with contextlib.suppress(TypeError, OSError):  # it is no function, or its file is not there
            yield inspect.getsource(function)
