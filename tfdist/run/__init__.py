"""One training run of the command, from its options to its record."""
