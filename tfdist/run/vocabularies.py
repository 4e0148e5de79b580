"""The vocabularies of a run: they lie in its folder, and are equal in all processes of a job."""

from __future__ import annotations

from typing import Any

from tfdist import data
from tfdist.data.formats import text
from tfdist.jobs import consensus
from tfdist.run.config import TrainConfig
from tfdist.run.folder import RunFolder, writing


def asks_chief(config: TrainConfig) -> bool:
    """Whether the dataset makes a vocabulary, which the other processes must get from the chief."""
    return (
        config.traits.processes and data.knows(config.dataset, "vocabulary") and "vocabulary" not in config.load_options
    )


def of_source(source: data.Source) -> dict[str, list[str]]:
    """The vocabularies of the dataset by name: lists of words in the order of their numbers."""
    found = {name: list(getattr(source.spec, name)) for name in ("vocabulary", "target_vocabulary")}
    return {name: tokens for name, tokens in found.items() if tokens}


def keep(folder: RunFolder, strategy: Any, source: data.Source) -> None:
    """Writes the vocabularies to the run folder; refuses other ones of another process or of a resumed run."""
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
