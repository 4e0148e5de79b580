"""What `python -m tfdist.data` does with a dataset, and its download."""
