"""Predicts throughput from short measurements: `rounds` and `measured` measure, and `costs` is the cost model.

`tfdist.advise` is the command.
"""
