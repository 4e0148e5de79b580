"""Programs that race tfdist and its peers in one run; see README.md here, and `python -m benchmarks.NAME --help`."""
