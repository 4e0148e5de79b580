"""Who takes part in a job, and whether each of them is still there; imports no TensorFlow."""
