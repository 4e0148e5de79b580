"""One class a text: as one class an example."""

from tfdist.tasks.classification import loss, metrics, show

__all__ = ["loss", "metrics", "show"]
