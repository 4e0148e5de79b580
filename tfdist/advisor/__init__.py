"""Predictions of throughput from short measurements: `costs` has the model, `measured` measures, `curves` draws.

`tfdist.advise` is the command.
"""
