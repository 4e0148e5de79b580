"""Replicas on devices and in processes, each with a copy of every variable."""
