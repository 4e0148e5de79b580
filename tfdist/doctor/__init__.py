"""What works on this machine and what does not, and why: `tfdist doctor`, and `tfdist env` for bug reports.

    packages    versions that fit together            network   loopback, the host's name, proxies, ssh
    engines     TensorFlow, MPI and Horovod load      job       TF_CONFIG, Slurm or MPI as found
    gpus        GPUs, CUDA's libraries and NCCL       folders   of datasets, caches, runs and temporary files
    machine     cores, memory, open files, clock      links     an all-reduce of two processes, timed

Each module has `findings(...)`. `readiness.of(strategy)` says whether a strategy can run here, and what to do if not.
What loads native code is tried in child processes with a time limit, so that nothing here can crash or hang.
"""
