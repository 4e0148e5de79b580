"""Traces of training steps, and what they show."""
