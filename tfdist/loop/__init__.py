"""The training loop, and the programs that make steps on several replicas equal to steps on one device."""
