"""Comparing the steps of a strategy with those of one device, or with the bound that the strategy states."""
