"""Predicts throughput from short measurements: `measured` measures, and `costs` is the cost model.

`tfdist.advise` is the command.
"""
