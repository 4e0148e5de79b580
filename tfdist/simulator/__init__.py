"""Training on many simulated workers in one process: real models, gradients and data, but simulated time.

replicas       the real training steps of the workers
state          the workers' moving averages and optimizers as arrays
clock          simulated time
links          the links of the machines, and `--link`
network        messages that share links
algorithms     who exchanges what with whom, and who waits
simulation     a run: its settings, and the results of its epochs
matrix         a study: all algorithms, numbers of workers and seeds of a file, and its table
"""
