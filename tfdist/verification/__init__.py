"""Compares the steps of a strategy with those of one device, or with the error bound of the strategy."""
