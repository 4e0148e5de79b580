"""Algorithms whose processes do not compute each step together: local SGD, gossip, elastic averaging."""
