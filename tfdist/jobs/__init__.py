"""The processes of a job: detection, rendezvous and heartbeat; imports no TensorFlow."""
