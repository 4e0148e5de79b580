"""The environment variables by which a process that the launcher started knows of its job, beside TF_CONFIG."""

JOB = "TFDIST_JOB"  # the job's name: the same in all processes, and after a restart
SHARE_CORES = "TFDIST_SHARE_CORES"  # take this process' share of the cores, by its local rank
RESTART = "TFDIST_RESTART"  # how often the job was started again
ELASTIC = "TFDIST_ELASTIC"  # leave at a checkpoint when told to
START_SECONDS = "TFDIST_START_SECONDS"  # how long processes wait for each other at the start
TYPED = "TFDIST_TYPED"  # the command that started the job, as it was typed
