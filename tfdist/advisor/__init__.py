"""Predicts throughput from short measurements: `measured` measures, `costs` is the cost model, `predictions` applies it.

`tfdist.advise` is the command.
"""
