"""The strategies by name: each is one module here, and the file is the registration.

Synopsis:

    >>> from tfdist import strategies
    >>> strategies.names()[:5]
    ['custom', 'gossip', 'hogwild', 'horovod', 'local_sgd']

    >>> strategies.having("elastic")
    ['gossip', 'horovod', 'local_sgd', 'multiworker']
    >>> strategies.taking("shard")
    ['horovod', 'mpi', 'multiworker']

A module `NAME.py` is a strategy if it defines `STRATEGY`, a subclass of `base.Strategy`. The names of strategies, their
traits (the constant `TRAITS` of a module) and the options of their constructors are read without importing TensorFlow.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import registry
from tfdist.errors import JobWarning, UsageError
from tfdist.interface import strategy_options
from tfdist.interface import traits as _traits
from tfdist.interface.strategy_options import Signature
from tfdist.interface.traits import Traits
from tfdist.jobs.world import ALONE, World

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy


def names() -> list[str]:
    """The names of all strategies of this folder."""
    return [name for name in registry.names(__name__) if name != "base"]


@functools.cache
def traits(name: str) -> Traits:
    """The `TRAITS` in the file of the strategy `name`, or in the module of a user's `module:Class`.

    Raises:
        UnknownNameError: no strategy has that name.
    """
    if ":" in name:
        path = registry.source_file(name.partition(":")[0])
        return Traits() if path is None else _traits.read(path)
    registry.require_known(name, "strategy", names())
    return _traits.read(Path(__file__).with_name(f"{name}.py"))


def having(trait: str) -> list[str]:
    """The names of the strategies with a trait: a true attribute of `Traits`."""
    return [name for name in names() if getattr(traits(name), trait)]


@functools.cache
def signature(name: str) -> Signature:
    """The options of the strategy `name`, or of the user's own `module:Class`.

    Raises:
        UnknownNameError: no strategy has that name.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        registry.make_importable(os.getcwd())
        return strategy_options.of_class(module, attribute)
    registry.require_known(name, "strategy", names())
    return strategy_options.of_class(f"{__name__}.{name}", "STRATEGY")


def taking(option: str) -> list[str]:
    """The names of the strategies whose constructor takes `option`."""
    return [name for name in names() if option in signature(name).options]


def create(name: str, **options: Any) -> Strategy:
    """Makes the strategy `name`.

    Args:
        name: one of `names()`, or a user's class as `module:Class`.
        options: the keyword arguments of the strategy's class.

    Raises:
        UnknownNameError: no strategy, or no device, has that name.
        UsageError: an option is unknown or cannot be used here, `module:Class` is not a strategy, or this process is
            the evaluator of a job in whose processes the strategy trains.
    """
    registry.require_text(name, "strategy")
    if traits(name).processes:
        _world().require_training(name)
    strategy_class = _users_class(name) if ":" in name else _class(name)
    strategy_class = strategy_class.of_job(_world())
    strategy: Strategy = registry.call(strategy_class, kind="strategy", name=name, options=options)
    if not traits(name).processes:
        _warn_of_other_processes(name)
    elif _world().source == ALONE and len(strategy.devices) == 1:
        _warn_of_being_alone(name)
    return strategy


def _warn_of_other_processes(name: str) -> None:
    """Warns if this process belongs to a job, whose processes would train independently of each other."""
    world = _world()
    if world.world_size > 1:
        warnings.warn(
            f"This process is {world.rank + 1} of {world.world_size} of a job ({world.source}), and the strategy "
            f"`{name}` trains in one process: each process of the job trains a model of its own. "
            f"To train one model, use one of {', '.join(f'`{other}`' for other in having('processes'))}",
            JobWarning,
            stacklevel=4,
        )


def _warn_of_being_alone(name: str) -> None:
    """Warns that a strategy for several processes has only this one, as if `--workers` had been forgotten."""
    warnings.warn(
        f"`{name}` trains in several processes, and this process is alone: neither `--workers` nor TF_CONFIG, `mpirun` "
        "or Slurm describes a job. Start a script with `python -m tfdist.launch --workers 2`, and the command with "
        "`--workers 2`",
        JobWarning,
        stacklevel=4,
    )


def _world() -> World:
    try:
        return World.detect(os.environ)
    except UsageError:  # the strategies that depend on it raise it, too
        return World()


def _class(name: str) -> type[Strategy]:
    registry.require_known(name, "strategy", names())
    strategy: type[Strategy] = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return strategy


def _users_class(reference: str) -> type[Strategy]:
    from tfdist.strategies.base import Strategy

    users_class = registry.resolve(reference, "strategy")
    if not (isinstance(users_class, type) and issubclass(users_class, Strategy)):
        raise UsageError(
            f"The strategy `{reference}` is not a subclass of `tfdist.strategies.base.Strategy`",
            "write one as docs/strategies.md shows",
        )
    return users_class
