"""Text classification, one class per text: the same as classification."""

from tfdist.tasks.classification import loss, metrics, show

__all__ = ["loss", "metrics", "show"]
