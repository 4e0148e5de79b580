"""The class from which every strategy derives, also one of your own: see docs/strategies.md."""

from tfdist.training.strategy import TrainingStrategy as Strategy

__all__ = ["Strategy"]
