"""Training on more workers than there are, in one process: real models, gradients and data, simulated time.

clock          events in the order of simulated time
replicas       the weights and optimizer of each worker, and its real steps
algorithms     who exchanges what, and who waits for whom
study          one run: what was reached, when, and what it took
"""
