"""`tfdist doctor` reports what works on this machine, what does not, and why; `tfdist env` is for bug reports.

    packages    compatible versions               network   loopback, host name, proxies, ssh
    engines     TensorFlow, MPI and Horovod load  job       TF_CONFIG, Slurm or MPI variables
    gpus        GPUs, CUDA libraries, NCCL        folders   datasets, caches, runs, temporary files
    machine     cores, memory, open files, clock  links     a timed all-reduce between two processes

Each module has a function `findings(...)`. `readiness.of(strategy)` tells whether a strategy can run here and, if not,
what to do. Native code is loaded in child processes with a time limit, so that it cannot crash or block the doctor.
"""
