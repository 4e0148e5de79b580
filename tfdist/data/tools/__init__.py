"""Tools for datasets: the speed of their pipelines, download, and loading for a model."""
