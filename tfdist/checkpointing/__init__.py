"""What a checkpoint holds, and how it is stored."""
