"""Predicts throughput from short measurements: `measured` measures, `costs` has the model, `predictions` applies it.

`tfdist.advise` is the command.
"""
