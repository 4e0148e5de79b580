"""Writes a job for a scheduler that starts the processes itself: a script for Slurm, manifests for Kubernetes.

Both run `python COMMAND` once per process. `World` detects the rest: under Slurm from Slurm's own variables, in a pod
from the TF_CONFIG that the pod's shell computes from the index of the pod.

Synopsis:

    >>> job = Job(("-m", "tfdist.train", "--strategy", "multiworker"), workers=4)
    >>> slurm(job).splitlines()[-1]
    'srun --kill-on-bad-exit=1 --label --distribution=block python -m tfdist.train --strategy multiworker'
    >>> [line for line in kubernetes(job).splitlines() if line.startswith("kind: ")]
    ['kind: Secret', 'kind: NetworkPolicy', 'kind: Service', 'kind: Job']
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import textwrap

from tfdist.errors import EXIT_USAGE, UsageError
from tfdist.jobs.job_environment import JOB, RESTART, SECRET, START_SECONDS
from tfdist.jobs.slurm import PARAMETER_SERVERS
from tfdist.launcher.job import Job

IMAGE = "registry.example.com/tfdist:edit-me"

# Every pod has its own address, so that all can listen on the same port.
POD_PORT = 2222
SECRET_BYTES = 32

# The longest name that Kubernetes allows for a service and for a host; a pod's host name ends with the pod's index.
MAX_LABEL_LENGTH = 63
KUBERNETES_PREFIX = "tfdist-"


def slurm(job: Job) -> str:
    """Returns a script for `sbatch` that runs the job.

    Raises:
        UsageError: the job names hosts, although Slurm chooses them.
    """
    _refuse_hosts(job, "slurm", "Slurm chooses the nodes, and `sbatch --nodelist=...` names them")
    size = len(job.roles)
    command = shlex.join(("python", *job.command))
    step = f"srun --kill-on-bad-exit=1 --label --distribution=block {command}"
    variables = [
        f'export {JOB}="slurm-$SLURM_JOB_ID"',
        f"export {START_SECONDS}={job.start_seconds:g}",
        "# By this secret, which `srun` passes on, the processes recognize each other.",
        f"{SECRET}=$(od -An -N{SECRET_BYTES} -tx1 /dev/urandom | tr -d ' \\n')",
        f"export {SECRET}",
    ]
    if job.ps:
        variables += [
            "# The number of parameter servers, which are the last processes; the first is the chief, the rest train.",
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
# Runs one program in {processes}, as a Slurm job: `sbatch FILE`. Check the lines below `edit`.

#SBATCH --job-name=tfdist
#SBATCH --output=%x-%j.out
#SBATCH --ntasks={size}
# edit: one process per node. With fewer nodes, processes share nodes; `--ntasks-per-node` limits how many.
#SBATCH --nodes={size}
# edit: resources per process. Remove one `#`, and set what your nodes have.
##SBATCH --cpus-per-task=8
##SBATCH --gpus-per-task=1
# edit: partition and time limit.
##SBATCH --partition=NAME
##SBATCH --time=04:00:00
{requeue}

# edit: make `python` the one with tfdist, for example by `source /shared/venv/bin/activate`. This comes before
# `set -u`, with which some activation scripts fail.

set -euo pipefail

# Since Slurm 22.05, a step does not inherit this setting from its job.
if [ -n "${{SLURM_CPUS_PER_TASK:-}}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
"""

_NO_REQUEUE = """\
# A failure ends the job, also if a node fails.
#SBATCH --no-requeue"""

_REQUEUE = """\
# A job that is put back into the queue, by Slurm or by the end of this script, runs this script again.
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

# If a process fails, all processes are ended and started again.
status=0
{step} || status=$?
# Exit code {usage}, which `srun` returns if no process has a higher code, is a usage error: a restart does not help.
if [ "$status" -ne 0 ] && [ "$status" -ne {usage} ] && [ "${variable}" -lt "$restarts" ]; then
  echo "The job failed with exit code $status; putting it back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status\""""


def kubernetes(job: Job, image: str = IMAGE) -> str:
    """Returns manifests for `kubectl apply`: a secret, a network policy, a service that names the pods, and the job.

    Args:
        job: the job.
        image: the container image, with `sh`, and with a `python` that has tfdist and the program.

    Raises:
        UsageError: the job names hosts, although Kubernetes chooses them, or has a name that Kubernetes does not allow.
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
        # Kubernetes expands `$(NAME)` in an argument, and replaces `$$` by a dollar.
        arguments="\n".join(f"            - {_quoted(word.replace('$', '$$'))}" for word in job.command),
        cluster=json.dumps(cluster),
        port=POD_PORT,
        job_variable=JOB,
        job_name=_quoted(job.name),
        secret_variable=SECRET,
        secret=secrets.token_hex(SECRET_BYTES),
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
# Runs one program in {size} pods: `kubectl apply -f FILE`. Check the lines below `edit`. Needs Kubernetes 1.29.

# By this secret, the pods recognize each other. Whoever reads this file knows it.
apiVersion: v1
kind: Secret
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
stringData:
  secret: "{secret}"
---
# TensorFlow's servers have no authentication: anyone who can reach one can run code in its pod. Therefore only the
# job's own pods may connect. The cluster's network plugin must enforce policies; not every plugin does. No ports are
# listed, since NCCL uses further ports besides {port}.
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
# Gives the pods the names {name}-0.{name} and so on, as soon as they have an address.
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
  # Kubernetes restarts single pods. With tfdist every process ends when one fails, so a failure of the job is a failure
  # of each pod, and all pods are restarted. This is the number of failures allowed per pod; the first pod that exceeds
  # it ends the job. (`backoffLimit` would count the failures of all pods together, restarts x pods, and the wait before
  # a restart would double with each pod, not with each restart: 10 s, 20 s, ... up to 10 minutes.) An eviction counts
  # as a failure.
  backoffLimitPerIndex: {restarts}
  maxFailedIndexes: 0
  # Two pods must never run the same rank at the same time.
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      # A restart does not help after a usage error ({usage}), or if the image has no working `python` (127, 126).
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
            - name: {secret_variable}
              valueFrom:
                secretKeyRef:
                  name: {name}
                  key: secret
            # edit: how long the first pod waits for the last one. This includes scheduling and pulling images.
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
    name = KUBERNETES_PREFIX + job_name
    longest = MAX_LABEL_LENGTH - len(f"-{size - 1}")
    if not re.fullmatch("[a-z0-9-]*[a-z0-9]", name) or len(name) > longest:
        raise UsageError(
            f"The job's name is `{job_name}`, which Kubernetes does not allow",
            f"use at most {longest - len(KUBERNETES_PREFIX)} lowercase letters, digits and dashes, no dash at the end",
        )
    return name


def _quoted(text: str) -> str:
    """Quotes a text for YAML in the double-quoted style: as JSON, with unprintable characters escaped."""
    characters = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in characters)
