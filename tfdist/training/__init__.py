"""What all strategies derive from: the interface with what users call, and what processes of a job share."""
