"""The interface of a strategy, as the training loop and the commands use it."""
