"""The base class of all strategies, including your own: see docs/strategies.md."""

from tfdist.training.strategy import TrainingStrategy as Strategy

__all__ = ["Strategy"]
