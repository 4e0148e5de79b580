"""One dataset per file: `load(data_dir, **options)` returns its `Source`."""
