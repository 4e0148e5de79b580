"""The training loop, and what makes its steps on several replicas equal to those of one device."""
