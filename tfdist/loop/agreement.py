"""What must be equal in all processes of a job before they train: the model, optimizer, loss, data and own code.

A difference would train something that no process was asked for: gradients of different losses would be summed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdist.data.input.feed import DataPasses
from tfdist.groups.tensorflow import PACKAGES
from tfdist.interface.strategy import Strategy
from tfdist.internals import keras as keras_internals
from tfdist.internals.keras import tree
from tfdist.jobs import consensus

# The folders of Python itself and of installed packages.
_INSTALLED = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def require_equal_training(strategy: Strategy, model: Any, passes: DataPasses, epochs: range, shuffle: Any) -> None:
    """Requires that all processes have the same model, optimizers and loss, and the same sizes of the data.

    Raises:
        DisagreementError: they differ; raised in every process, with the values of all processes.
    """
    if strategy.world.world_size == 1:
        return
    optimizers, losses = keras_internals.optimizers(model), getattr(model, "loss", None)
    # Without the name, which counts the optimizers of the process.
    settings = [
        {name: keras_internals.without_addresses(value) for name, value in optimizer.get_config().items()}
        | {"name": None}
        for optimizer in optimizers
    ]
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
        "`shuffle`": str(shuffle),
    }
    consensus.require_equal(strategy, facts | code_of_user([*keras_internals.parts(model), *tree.flatten(losses)]))


def _name_of_loss(loss: Any) -> Any:
    return loss if isinstance(loss, str | None) else getattr(loss, "name", None) or type(loss).__name__


def code_of_user(objects: Iterable[Any]) -> dict[str, str]:
    """Hashes of the functions among `objects`, of the classes of the others, and of what these call, by their names.

    Of a function, the hash is of its source, and for one among `objects` of the numbers and strings that it takes from
    outside; of a class, of its methods and of the numbers and strings that it has. Code of installed packages and of
    tfdist is left out, and code whose source is not known.
    """
    given = dict.fromkeys(itertools.chain.from_iterable(map(_kinds, objects)))
    kinds, known = list(given), dict[str, list[str]]()
    for kind in kinds:
        sources, used = _code(kind)
        kinds += [each for each in used if each not in kinds]  # the loop continues with them
        if inspect.isfunction(kind) and kind in given:
            outside = inspect.getclosurevars(inspect.unwrap(kind))
            sources.append(str(sorted(_plain({**outside.nonlocals, **outside.globals}).items())))
        if sources:
            known.setdefault(f"the code of {kind.__qualname__}", []).extend(sources)
    return {name: consensus.fingerprint(sources) for name, sources in known.items()}


def _kinds(part: Any) -> Sequence[Any]:
    while isinstance(part, functools.partial):
        part = part.func
    part = inspect.unwrap(part)  # of `tf.function`, for example
    return [each for each in ([part] if inspect.isfunction(part) else type(part).__mro__) if _is_of_user(each)]


def _is_of_user(kind: Any) -> bool:
    """Whether a function or a class is not of an installed package, nor of Python or tfdist."""
    module = kind.__module__ or ""
    if module.partition(".")[0] in PACKAGES:  # whose versions are compared when the processes meet
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = file is None or any(Path(file).resolve().is_relative_to(folder) for folder in _INSTALLED)
    return module == "__main__" or not installed


def _code(kind: Any) -> tuple[list[str], list[Any]]:
    """The sources of a function, or of the methods of a class with its plain values; and the user's code they use."""
    values = [kind] if inspect.isfunction(kind) else [getattr(value, "fget", value) for value in vars(kind).values()]
    sources, used = [], list[Any]()
    for function in values:
        with contextlib.suppress(TypeError, OSError):  # it is no function, or its file is not there
            sources.append(inspect.getsource(function))
            outside = inspect.getclosurevars(inspect.unwrap(function))
            called = [*outside.nonlocals.values(), *outside.globals.values()]
            used += [each for each in called if inspect.isfunction(each) or inspect.isclass(each)]
    if sources and inspect.isclass(kind):
        public = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
        sources.append(str(sorted(_plain(public).items())))
    return sources, [each for each in used if _is_of_user(each)]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | np.generic)}


def _settings_of_loss(loss: Any) -> Any:
    """The settings of a loss: those that it returns, that a class of the user keeps, or that a partial function has."""
    if isinstance(loss, functools.partial):
        arguments = _plain({str(position): value for position, value in enumerate(loss.args)} | loss.keywords)
        return [arguments, _settings_of_loss(loss.func)]
    is_of_user = isinstance(loss, keras.losses.Loss) and not keras_internals.is_of_keras(type(loss))
    kept = {name: value for name, value in vars(loss).items() if name != "name"} if is_of_user else {}
    return keras_internals.settings(loss) | _plain(kept)
