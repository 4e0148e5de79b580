"""The vocabularies of a run: the words by number are kept beside it, and all processes of a job have the same."""

from __future__ import annotations

from typing import Any

from tfdist import data
from tfdist.cluster import consensus
from tfdist.data.formats import text
from tfdist.run.config import TrainConfig
from tfdist.run.folder import RunFolder, writing


def asks_chief(config: TrainConfig) -> bool:
    """Whether the dataset makes a vocabulary, and other processes shall have the same."""
    return (
        config.traits.processes and data.knows(config.dataset, "vocabulary") and "vocabulary" not in config.load_options
    )


def of_source(source: data.Source) -> dict[str, list[str]]:
    """The words by number of those vocabularies that the dataset has."""
    found = {name: list(getattr(source.spec, name)) for name in ("vocabulary", "target_vocabulary")}
    return {name: tokens for name, tokens in found.items() if tokens}


def keep(folder: RunFolder, strategy: Any, source: data.Source) -> None:
    """The words by number are beside the run; all processes, and a run that goes on, have the same."""
    found = of_source(source)
    if not found:
        return
    if strategy.world.world_size > 1:
        facts = {name: consensus.fingerprint(tokens) for name, tokens in found.items()}
        splits = [split for split in data.SPLITS if source.spec.examples[split]]
        facts |= {f"the words of `{split}`": _fingerprint_of_numbers(source, split) for split in splits}
        consensus.require_equal(strategy, facts)
    if strategy.world.is_chief:
        with writing(folder.path):
            for name, tokens in found.items():
                text.keep_vocabulary(getattr(folder, name), tokens)


def _fingerprint_of_numbers(source: data.Source, split: str) -> str:
    x, y = source.arrays(split)
    return consensus.fingerprint_of_arrays([*(x.values() if isinstance(x, dict) else [x]), y])
