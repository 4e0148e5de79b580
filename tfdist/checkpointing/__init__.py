"""The content of checkpoints, and how they are stored."""
