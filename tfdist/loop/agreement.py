"""What must be equal in all processes of a job before they train: the model, optimizer, loss, data and own code.

A difference would train something that no process was asked for: gradients of different losses would be summed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

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
        "the settings of the loss": consensus.fingerprint(list(map(_settings_of_loss, tree.flatten(losses)))),
        "the weights of the losses": str(keras_internals.loss_weights(model)),
        "the examples in an epoch": passes.examples,
        "the batches in an epoch": passes.num_batches,
        "the batch size": passes.feed.batch_size,
        "the epochs": f"{epochs.start} to {epochs.stop}",
    }
    consensus.require_equal(strategy, facts | code_of_user([*keras_internals.parts(model), *tree.flatten(losses)]))


def _name_of_loss(loss: Any) -> Any:
    return loss if isinstance(loss, str | None) else getattr(loss, "name", None) or type(loss).__name__


def code_of_user(objects: Iterable[Any]) -> dict[str, str]:
    """Hashes of the functions among `objects`, and of the classes of the others, by their names.

    Of a function, the hash is of its source and of the numbers and strings that it takes from outside; of a class, of
    the source of its methods. Code of Keras, TensorFlow and tfdist is left out, and code whose source is not known.
    """
    kinds = dict.fromkeys(itertools.chain.from_iterable(map(_kinds, objects)))
    known: dict[str, list[str]] = {}
    for kind in kinds:
        if (kind.__module__ or "").partition(".")[0] not in COMPARED_PACKAGES and (sources := list(_sources(kind))):
            known.setdefault(f"the code of {kind.__qualname__}", []).extend(sources)
    return {name: consensus.fingerprint(sources) for name, sources in known.items()}


def _kinds(part: Any) -> Sequence[Any]:
    while isinstance(part, functools.partial):
        part = part.func
    return [part] if inspect.isfunction(part) else type(part).__mro__


def _sources(kind: Any) -> Iterator[str]:
    """The source of a function with the values that it takes from outside, or of the methods of a class."""
    functions = [kind] if inspect.isfunction(kind) else [getattr(value, "fget", value) for value in vars(kind).values()]
    for function in functions:
        with contextlib.suppress(TypeError, OSError):  # it is no function, or its file is not there
            yield inspect.getsource(function)
    if inspect.isfunction(kind):
        outside = inspect.getclosurevars(inspect.unwrap(kind))
        yield str(sorted(_plain({**outside.nonlocals, **outside.globals}).items()))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def _settings_of_loss(loss: Any) -> Any:
    """The settings of a loss: those that it returns, that a class of the user keeps, or that a partial function has."""
    if isinstance(loss, functools.partial):
        arguments = _plain({str(position): value for position, value in enumerate(loss.args)} | loss.keywords)
        return [arguments, _settings_of_loss(loss.func)]
    is_of_user = isinstance(loss, keras.losses.Loss) and not keras_internals.is_of_keras(type(loss))
    kept = {name: value for name, value in vars(loss).items() if name != "name"} if is_of_user else {}
    return keras_internals.settings(loss) | _plain(kept)
