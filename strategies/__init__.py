"""The strategies by name: each is one module here, and the file is the registration.

Synopsis:

    >>> from tfdist import strategies
    >>> strategies.names()[:5]
    ['custom', 'gossip', 'hogwild', 'horovod', 'local_sgd']

    >>> strategies.having("elastic")
    ['gossip', 'horovod', 'local_sgd', 'multiworker']
    >>> strategies.taking("shard")
    ['horovod', 'mpi', 'multiworker']

A module `NAME.py` is a strategy when it defines `STRATEGY`, a subclass of `base.Strategy`. The names of strategies,
their traits, the constant `TRAITS` of a module, and the options of their constructors are found without importing
TensorFlow.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist import registry
from tfdist.errors import UsageError
from tfdist.interface import signatures
from tfdist.interface import traits as _traits
from tfdist.interface.signatures import Signature
from tfdist.interface.traits import Traits
from tfdist.jobs.world import World

if TYPE_CHECKING:
    from tfdist.strategies.base import Strategy


def names() -> list[str]:
    """The names of all strategies of this folder."""
    return [name for name in registry.names(__name__) if name != "base"]


@functools.cache
def traits(name: str) -> Traits:
    """The `TRAITS` in the file of the strategy `name`, or in the module of the user's own `module:Class`.

    Raises:
        UnknownNameError: no strategy has that name.
    """
    if ":" in name:
        found = registry.source_file(name.partition(":")[0])
        return Traits() if found is None else _traits.read(found)
    registry.require_known(name, "strategy", names())
    return _traits.read(Path(__file__).with_name(f"{name}.py"))


def having(trait: str) -> list[str]:
    """The names of the strategies with a trait: an attribute of `Traits` that is set."""
    return [name for name in names() if getattr(traits(name), trait)]


def signature(name: str) -> Signature:
    """The options of the strategy `name`, or of the user's own `module:Class`.

    Raises:
        UnknownNameError: no strategy has that name.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        return signatures.of_class(module, attribute)
    registry.require_known(name, "strategy", names())
    return signatures.of_class(f"{__name__}.{name}", "STRATEGY")


def taking(option: str) -> list[str]:
    """The names of the strategies whose constructor takes `option`."""
    return [name for name in names() if option in signature(name).options]


def create(name: str, **options: Any) -> Strategy:
    """Makes the strategy `name`.

    Args:
        name: one of `names()`, or the user's own class as `module:Class`.
        options: the keyword arguments of the strategy's class.

    Raises:
        UnknownNameError: no strategy, or no device, has that name.
        UsageError: an option is unknown or cannot work here, or `module:Class` leads to no strategy.
    """
    constructor = _users_own(name) if ":" in name else _ours(name)
    constructor = constructor.of_job(_world())
    strategy: Strategy = registry.call(constructor, kind="strategy", name=name, options=options)
    if not traits(name).processes:
        _warn_of_other_processes(name)
    return strategy


def _warn_of_other_processes(name: str) -> None:
    """Warns that processes of one job train apart from each other."""
    world = _world()
    if world.world_size > 1:
        warnings.warn(
            f"This process is {world.rank + 1} of {world.world_size} of a job ({world.source}), and the strategy "
            f"`{name}` trains in one process: each process of the job trains by itself, on all data that it is given. "
            f"To train together, use one of {', '.join(f'`{one}`' for one in having('processes'))}",
            stacklevel=4,
        )


def _world() -> World:
    try:
        return World.detect(os.environ)
    except UsageError:  # the strategies that depend on it raise it, too
        return World()


def _ours(name: str) -> type[Strategy]:
    registry.require_known(name, "strategy", names())
    strategy: type[Strategy] = importlib.import_module(f"{__name__}.{name}").STRATEGY
    return strategy


def _users_own(reference: str) -> type[Strategy]:
    from tfdist.strategies.base import Strategy

    found = registry.resolve(reference, "strategy")
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise UsageError(
            f"The strategy `{reference}` is not a subclass of `tfdist.strategies.base.Strategy`",
            "write one as docs/strategies.md shows",
        )
    return found
