"""One dataset a file: `load(data_dir, **options)` returns its `Source`."""
