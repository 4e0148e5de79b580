"""Writes a job for a scheduler that starts the processes itself: a script for Slurm, manifests for Kubernetes.

Each runs `python COMMAND` once per process. `World` detects the rest: under Slurm from Slurm's own variables, in a pod
from its TF_CONFIG. Kubeflow's TFJob sets that; in the pods of a Job and of Kubeflow's TrainJob, the shell computes it
from the index of the pod. The pods of all three are otherwise the same.

Synopsis:

    >>> from tfdist.launcher.job import Job
    >>> job = Job(("-m", "tfdist.train", "--strategy", "multiworker"), workers=4)
    >>> slurm(job).splitlines()[-1]
    'srun --kill-on-bad-exit=1 --label --distribution=block python -m tfdist.train --strategy multiworker'
    >>> [line for line in kubernetes(job).splitlines() if line.startswith("kind: ")]
    ['kind: Secret', 'kind: NetworkPolicy', 'kind: Service', 'kind: Job']
    >>> [line for line in tfjob(job).splitlines() if line.startswith("kind: ")]
    ['kind: Secret', 'kind: NetworkPolicy', 'kind: TFJob']
"""

from tfdist.launcher.emit.kubeflow import tfjob, trainjob
from tfdist.launcher.emit.kubernetes import kubernetes
from tfdist.launcher.emit.slurm import slurm

# What each value of `--emit` writes.
TARGETS = {"slurm": slurm, "kubernetes": kubernetes, "trainjob": trainjob, "tfjob": tfjob}
