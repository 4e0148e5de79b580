"""Traces of training steps, and what they show: costly operations, waits, and the stages of a pipeline."""
