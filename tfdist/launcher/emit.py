"""A job as text for a scheduler that starts the processes itself: a script for Slurm, manifests for Kubernetes.

Both run `python COMMAND` once per process. `World` detects the rest: under Slurm from Slurm's own variables, in a pod
from the TF_CONFIG that the pod's shell makes from the index of the pod.

Synopsis:

    >>> job = Job(("-m", "tfdist.train", "--strategy", "multiworker"), workers=4)
    >>> slurm(job).splitlines()[-1]
    'srun --kill-on-bad-exit=1 --label --distribution=block python -m tfdist.train --strategy multiworker'
    >>> [line for line in kubernetes(job).splitlines() if line.startswith("kind: ")]
    ['kind: NetworkPolicy', 'kind: Service', 'kind: Job']
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap

from tfdist.errors import EXIT_USAGE, UsageError
from tfdist.jobs.job_environment import JOB, RESTART, START_SECONDS
from tfdist.jobs.slurm import PARAMETER_SERVERS
from tfdist.launcher.job import Job

IMAGE = "registry.example.com/tfdist:edit-me"

# Every pod has its own address, so that all can listen on the same port.
POD_PORT = 2222

# The names that Kubernetes allows for a service, and for a pod's host, which ends with a dash and the pod's index.
LONGEST_LABEL = 63
KUBERNETES_PREFIX = "tfdist-"


def slurm(job: Job) -> str:
    """The job as a script for `sbatch`.

    Raises:
        UsageError: the job names hosts, which Slurm chooses.
    """
    _refuse_hosts(job, "slurm", "Slurm chooses the nodes, and `sbatch --nodelist=...` names them")
    size = len(job.roles)
    command = shlex.join(("python", *job.command))
    step = f"srun --kill-on-bad-exit=1 --label --distribution=block {command}"
    variables = [f'export {JOB}="slurm-$SLURM_JOB_ID"', f"export {START_SECONDS}={job.start_seconds:g}"]
    if job.ps:
        variables += [
            "# The last processes, this many, are parameter servers; the first is the chief, the others are workers.",
            f"export {PARAMETER_SERVERS}={job.ps}",
        ]
    return "\n".join(
        [
            _SLURM_HEAD.format(
                size=size,
                processes=f"{size} processes" if size > 1 else "one process",
                requeue=_REQUEUE if job.restarts else _NO_REQUEUE,
            ),
            *variables,
            _SLURM_RESTARTS.format(restarts=job.restarts, variable=RESTART, step=step, usage=EXIT_USAGE)
            if job.restarts
            else step,
            "",
        ]
    )


_SLURM_HEAD = """\
#!/usr/bin/env bash
# Runs one program in {processes}, as a job of Slurm: `sbatch FILE`. Look through the lines under `edit`.

#SBATCH --job-name=tfdist
#SBATCH --output=%x-%j.out
#SBATCH --ntasks={size}
# edit: one process per node. With fewer nodes, some processes use the same node; `--ntasks-per-node` limits them.
#SBATCH --nodes={size}
# edit: resources per process. Remove one `#`, and write what your nodes have.
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-task=1
# edit: partition and time limit.
##SBATCH --partition=NAME
##SBATCH --time=04:00:00
{requeue}

# edit: make `python` the one that has tfdist, for example by `source /shared/venv/bin/activate`. This comes before
# `set -u`, with which some of these scripts fail.

set -euo pipefail

# Since Slurm 22.05, a step does not inherit this from its job.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
"""

_NO_REQUEUE = """\
# A failure ends the job, also the failure of a node.
#SBATCH --no-requeue"""

_REQUEUE = """\
# A job that was put back into the queue, by Slurm or by the end of this script, runs this script again.
#SBATCH --requeue
#SBATCH --open-mode=append"""

# `scancel` and the time limit end this script together with its processes, before it can requeue the job.
_SLURM_RESTARTS = """\

# The number of restarts of this job by Slurm; above 0, tfdist.train continues from its last checkpoint.
export {variable}=${{SLURM_RESTART_COUNT:-0}}
restarts={restarts}
if [ "${variable}" -gt "$restarts" ]; then
  echo "error: Slurm has restarted this job ${variable} times; at most $restarts restarts are allowed" >&2
  exit 1
fi

# If one process fails, all are ended, and all start again.
status=0
{step} || status=$?
# Exit code {usage}, which `srun` returns if no process has a higher one, means that the program's input needs a change.
if [ "$status" -ne 0 ] && [ "$status" -ne {usage} ] && [ "${variable}" -lt "$restarts" ]; then
  echo "The job failed with exit code $status; putting it back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status\""""


def kubernetes(job: Job, image: str = IMAGE) -> str:
    """The job as manifests for `kubectl apply`: a network policy, a service that names the pods, and the job itself.

    Args:
        job: what to run.
        image: the container image, with `sh`, and with a `python` that has tfdist and the program.

    Raises:
        UsageError: the job names hosts, which Kubernetes chooses, or has a name that Kubernetes does not allow.
    """
    _refuse_hosts(job, "kubernetes", "Kubernetes chooses the nodes; `nodeSelector` in the manifest narrows them")
    size = len(job.roles)
    name = _kubernetes_name(job.name, size)
    cluster = job.cluster([f"{name}-{rank}.{name}:{POD_PORT}" for rank in range(size)])
    return _MANIFESTS.format(
        name=name,
        size=size,
        restarts=job.restarts,
        image=_quoted(image),
        snippet=textwrap.indent(_RANK_TO_ROLE.format(role=_role_of_rank(job)), " " * 14).strip(),
        # Kubernetes reads `$(NAME)` in an argument as a variable, and `$$` as a dollar.
        arguments="\n".join(f"            - {_quoted(word.replace('$', '$$'))}" for word in job.command),
        cluster=json.dumps(cluster),
        port=POD_PORT,
        job_variable=JOB,
        job_name=_quoted(job.name),
        start_variable=START_SECONDS,
        start_seconds=_quoted(f"{job.start_seconds:g}"),
        restart_variable=RESTART,
        usage=EXIT_USAGE,
    )


# Kubernetes replaces only `$(NAME)`; it leaves `$rank` and `$((rank - 1))` unchanged.
_RANK_TO_ROLE = """\
rank=$JOB_COMPLETION_INDEX
{role}
export TF_CONFIG='{{"cluster": '"$CLUSTER"', "task": {{"type": "'"$role"'", "index": '"$index"'}}}}'
exec python "$@"
"""


def _role_of_rank(job: Job) -> str:
    """Shell code that computes `role` and `index` from `rank`, in the order of `job.roles`."""
    if not job.ps:
        return "role=worker index=$rank"
    return (
        "if [ $rank -eq 0 ]; then role=chief index=0\n"
        f"elif [ $rank -le {job.workers} ]; then role=worker index=$((rank - 1))\n"
        f"else role=ps index=$((rank - {job.workers + 1})); fi"
    )


_MANIFESTS = """\
# Runs one program in {size} pods: `kubectl apply -f FILE`. Look through the lines under `edit`. Needs Kubernetes 1.29.

# TensorFlow's servers have no authentication: anyone who can reach one can run code in its pod. Therefore only the
# job's own pods may connect. The cluster's network plugin must enforce policies; not every plugin does. No ports are
# listed, since NCCL uses others besides {port}.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
spec:
  podSelector:
    matchLabels:
      tfdist-job: {name}
  policyTypes:
    - Ingress
  ingress:
    - from:
        - podSelector:
            matchLabels:
              tfdist-job: {name}
---
# Gives the pods the names {name}-0.{name} and so on, from the moment they have an address.
apiVersion: v1
kind: Service
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    tfdist-job: {name}
  ports:
    - name: tensorflow
      port: {port}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
spec:
  completionMode: Indexed
  completions: {size}
  parallelism: {size}
  # Kubernetes restarts single pods. With tfdist every process ends when one fails, so that one failure of the job is
  # one failure of each pod, and all pods are restarted. This is the number of failures allowed per pod; the first pod
  # that exceeds it ends the job. (`backoffLimit` would count the failures of all pods together, restarts x pods, and
  # the wait before a restart would double with each pod, not with each restart: 10 s, 20 s, ... up to 10 minutes.) An
  # eviction counts as a failure.
  backoffLimitPerIndex: {restarts}
  maxFailedIndexes: 0
  # Never two pods of one rank at a time.
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      # A restart does not help: the program's input needs a change ({usage}), or the image has no `python` that runs
      # (127, 126).
      - action: FailJob
        onExitCodes:
          containerName: tfdist
          operator: In
          values:
            - {usage}
            - 126
            - 127
  template:
    metadata:
      labels:
        tfdist-job: {name}
    spec:
      subdomain: {name}
      restartPolicy: Never
      automountServiceAccountToken: false
      securityContext:
        # edit: if the image sets no user, or not by number, add `runAsUser: 1000`; if a volume belongs to root, add
        # `fsGroup: 1000`.
        runAsNonRoot: true
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: tfdist
          # edit: an image with tfdist, and with the program.
          image: {image}
          command:
            - sh
            - -c
            - |
              {snippet}
            - sh
          args:
{arguments}
          env:
            - name: CLUSTER
              value: |-
                {cluster}
            - name: {job_variable}
              value: {job_name}
            # edit: how long the first pod waits for the last. This includes scheduling and pulling images.
            - name: {start_variable}
              value: {start_seconds}
            # The number of restarts of this pod; above 0, tfdist.train continues from its last checkpoint.
            - name: {restart_variable}
              valueFrom:
                fieldRef:
                  fieldPath: metadata.annotations['batch.kubernetes.io/job-index-failure-count']
          ports:
            - containerPort: {port}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop:
                - ALL
          # edit: the resources of a pod.
          # resources:
          #   limits:
          #     cpu: 4
          #     memory: 8Gi
          #     nvidia.com/gpu: 1
          # edit: a pod's own files are deleted with it. Run folders, where a restarted job finds its checkpoints,
          # belong on a volume that all pods can write to (`ReadWriteMany`).
          # volumeMounts:
          #   - name: runs
          #     mountPath: /runs
      # volumes:
      #   - name: runs
      #     persistentVolumeClaim:
      #       claimName: NAME
"""


def _refuse_hosts(job: Job, target: str, hint: str) -> None:
    if job.hosts:
        raise UsageError(f"`--hosts` is `{','.join(job.hosts)}` with `--emit {target}`", f"leave it out: {hint}")


def _kubernetes_name(job_name: str, size: int) -> str:
    """The name of the job's objects in Kubernetes."""
    name = KUBERNETES_PREFIX + job_name
    longest = LONGEST_LABEL - len(f"-{size - 1}")
    if not re.fullmatch("[a-z0-9-]*[a-z0-9]", name) or len(name) > longest:
        raise UsageError(
            f"The job's name is `{job_name}`, which Kubernetes does not allow",
            f"use at most {longest - len(KUBERNETES_PREFIX)} lowercase letters, digits and dashes; no dash at the end",
        )
    return name


def _quoted(text: str) -> str:
    """A text in YAML's double-quoted style: as in JSON, with characters that cannot be printed as escapes."""
    characters = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in characters)
