"""Writes a job for a scheduler that starts the processes itself: a script for Slurm, manifests for Kubernetes.

Each runs `python COMMAND` once per process. `World` detects the rest: under Slurm from Slurm's own variables, in a pod
from its TF_CONFIG. Kubeflow's TFJob sets that; in the pods of a Job and of Kubeflow's TrainJob, the shell computes it
from the index of the pod. The pods of all three are otherwise the same.

Synopsis:

    >>> job = Job(("-m", "tfdist.train", "--strategy", "multiworker"), workers=4)
    >>> slurm(job).splitlines()[-1]
    'srun --kill-on-bad-exit=1 --label --distribution=block python -m tfdist.train --strategy multiworker'
    >>> [line for line in kubernetes(job).splitlines() if line.startswith("kind: ")]
    ['kind: Secret', 'kind: NetworkPolicy', 'kind: Service', 'kind: Job']
    >>> [line for line in tfjob(job).splitlines() if line.startswith("kind: ")]
    ['kind: Secret', 'kind: NetworkPolicy', 'kind: TFJob']
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
KUBERNETES_HINT = "Kubernetes chooses the nodes; `nodeSelector` in the manifest narrows them"

# Kubeflow Trainer's name for the container that trains, and for the job of its pods.
NODE = "node"
TFJOB_ROLES = {"chief": "Chief", "worker": "Worker", "ps": "PS"}


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
    _refuse_hosts(job, "kubernetes", KUBERNETES_HINT)
    size = len(job.roles)
    name = _kubernetes_name(job.name, f"-{size - 1}")
    addresses = [f"{name}-{rank}.{name}:{POD_PORT}" for rank in range(size)]
    pod = _pod(
        job,
        image,
        container="tfdist",
        snippet=_RANK_TO_ROLE.format(role=_role_of_rank(job)),
        environment=[
            *_cluster_variable(job, addresses),
            *_shared_variables(job, name),
            "# The number of restarts of this pod; above 0, tfdist.train continues from its last checkpoint.",
            *_field(RESTART, "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"),
        ],
        head=[f"subdomain: {name}", "restartPolicy: Never"],
    )
    parts = {"name": name, "size": size, "port": POD_PORT, "restarts": job.restarts}
    return "".join(
        [
            _head("Kubernetes 1.29", name, size),
            _SERVICE.format(**parts),
            _JOB.format(failure_policy=_indented(_failure_policy("tfdist"), 2), pod=_indented(pod, 6), **parts),
        ]
    )


def trainjob(job: Job, image: str = IMAGE) -> str:
    """Returns manifests for Kubeflow Trainer 2.2: a secret, a network policy, a `TrainingRuntime` and a `TrainJob`.

    The arguments and errors are those of `kubernetes`.
    """
    _refuse_hosts(job, "trainjob", KUBERNETES_HINT)
    size = len(job.roles)
    # The names of pods end with the index and five random characters.
    name = _kubernetes_name(job.name, f"-{NODE}-0-{size - 1}-12345")
    # JobSet gives its pods a service with its own name.
    addresses = [f"{name}-{NODE}-0-{rank}.{name}:{POD_PORT}" for rank in range(size)]
    pod = _pod(
        job,
        image,
        container=NODE,
        snippet=_RANK_TO_ROLE.format(role=_role_of_rank(job)),
        environment=[
            *_cluster_variable(job, addresses),
            *_shared_variables(job, name),
            "# The number of restarts of the job; above 0, tfdist.train continues from its last checkpoint.",
            *_field(RESTART, "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"),
        ],
        head=["restartPolicy: Never"],
    )
    parts = {"name": name, "size": size, "restarts": job.restarts, "node": NODE}
    return "".join(
        [
            _head("Kubeflow Trainer 2.2", name, size),
            _TRAINJOB.format(failure_policy=_indented(_failure_policy(NODE), 14), pod=_indented(pod, 18), **parts),
        ]
    )


def tfjob(job: Job, image: str = IMAGE) -> str:
    """Returns manifests for Kubeflow's Training Operator 1: a secret, a network policy and a `TFJob`.

    The arguments and errors are those of `kubernetes`.
    """
    _refuse_hosts(job, "tfjob", KUBERNETES_HINT)
    size = len(job.roles)
    name = _kubernetes_name(job.name, f"-worker-{size - 1}")
    pod = _pod(
        job,
        image,
        container="tensorflow",
        snippet=_COUNT_RESTARTS if job.restarts else 'exec python "$@"\n',
        environment=_shared_variables(job, name),
        mounts=["- name: restarts", "  mountPath: /restarts"] if job.restarts else [],
        volumes=["- name: restarts", "  emptyDir: {}"] if job.restarts else [],
        port_name="tfjob-port",
    )
    counts = {role: sum(other == role for other, _ in job.roles) for role in ("chief", "worker", "ps")}
    policy = "OnFailure" if job.restarts else "Never"
    replicas = "".join(
        _REPLICA.format(role=TFJOB_ROLES[role], count=count, policy=policy, pod=_indented(pod, 6), name=name)
        for role, count in counts.items()
        if count
    )
    return "".join(
        [
            _head("Kubeflow's Training Operator 1.9", name, size),
            # A failure of the job is a failure of each pod, and the operator counts those of all pods together.
            _TFJOB.format(
                name=name, most_failures=job.restarts * size + 1 if job.restarts else 0, replicas=_indented(replicas, 4)
            ),
        ]
    )


# Kubernetes replaces only `$(NAME)`; it leaves `$rank` and `$((rank - 1))` unchanged.
_RANK_TO_ROLE = """\
rank=$JOB_COMPLETION_INDEX
{role}
export TF_CONFIG='{{"cluster": '"$CLUSTER"', "task": {{"type": "'"$role"'", "index": '"$index"'}}}}'
exec python "$@"
"""

# The operator has no variable for it. The volume lives as long as the pod, which keeps its place after a failure.
_COUNT_RESTARTS = """\
read -r TFDIST_RESTART < /restarts/count || TFDIST_RESTART=0
export TFDIST_RESTART
echo $((TFDIST_RESTART + 1)) > /restarts/count
exec python "$@"
"""


def _head(needs: str, name: str, size: int) -> str:
    """What all manifests begin with: a comment, the secret of the job, and the network policy of its pods."""
    secret = secrets.token_hex(SECRET_BYTES)
    return _HEAD.format(needs=needs, size=size) + _SECRET_AND_POLICY.format(secret=secret, name=name)


def _role_of_rank(job: Job) -> str:
    """Shell code that computes `role` and `index` from `rank`, in the order of `job.roles`."""
    if not job.ps:
        return "role=worker index=$rank"
    return (
        "if [ $rank -eq 0 ]; then role=chief index=0\n"
        f"elif [ $rank -le {job.workers} ]; then role=worker index=$((rank - 1))\n"
        f"else role=ps index=$((rank - {job.workers + 1})); fi"
    )


def _cluster_variable(job: Job, addresses: list[str]) -> list[str]:
    return ["- name: CLUSTER", "  value: |-", f"    {json.dumps(job.cluster(addresses))}"]


def _shared_variables(job: Job, name: str) -> list[str]:
    """The lines of the variables that are the same in all pods."""
    return [
        f"- name: {JOB}",
        f"  value: {_quoted(job.name)}",
        f"- name: {SECRET}",
        "  valueFrom:",
        "    secretKeyRef:",
        f"      name: {name}",
        "      key: secret",
        "# edit: how long the first pod waits for the last one. This includes scheduling and pulling images.",
        f"- name: {START_SECONDS}",
        f"  value: {_quoted(f'{job.start_seconds:g}')}",
    ]


def _field(name: str, path: str) -> list[str]:
    return [f"- name: {name}", "  valueFrom:", "    fieldRef:", f"      fieldPath: {path}"]


def _indented(text: str, spaces: int) -> str:
    return textwrap.indent(text, " " * spaces).strip()


def _pod(
    job: Job,
    image: str,
    *,
    container: str,
    snippet: str,
    environment: list[str],
    head: list[str] | None = None,
    mounts: list[str] | None = None,
    volumes: list[str] | None = None,
    port_name: str = "",
) -> str:
    """Returns the specification of a pod.

    Args:
        job: the job.
        image: the container image.
        container: the name of the container.
        snippet: the shell code that starts the program with `exec python "$@"`.
        environment: the lines of its variables.
        head: the lines before the security context.
        mounts: the lines of its volume mounts.
        volumes: the lines of its volumes.
        port_name: the name of its port, if something looks it up.
    """
    indented = {
        "mounts": _indented("\n".join(mounts or []), 6),
        "volumes": _indented("\n".join(volumes or []), 2),
    }
    return _POD.format(
        head="".join(f"{line}\n" for line in head or []),
        container=container,
        image=_quoted(image),
        snippet=_indented(snippet, 8),
        # Kubernetes expands `$(NAME)` in an argument, and replaces `$$` by a dollar.
        arguments=_indented("\n".join(f"- {_quoted(word.replace('$', '$$'))}" for word in job.command), 6),
        environment=_indented("\n".join(environment), 6),
        port=f"name: {port_name}\n        containerPort: {POD_PORT}" if port_name else f"containerPort: {POD_PORT}",
        mounts=_WITH_MOUNTS.format(**indented) if mounts else _WITHOUT_MOUNTS,
        volumes=_WITH_VOLUMES.format(**indented) if volumes else _WITHOUT_VOLUMES,
    )


def _failure_policy(container: str) -> str:
    return _FAILURE_POLICY.format(container=container, usage=EXIT_USAGE)


_HEAD = """\
# Runs one program in {size} pods: `kubectl apply -f FILE`. Check the lines below `edit`. Needs {needs}.

"""

_SECRET_AND_POLICY = """\
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
# listed, since NCCL uses further ports.
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
"""

_SERVICE = """\
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
"""

_FAILURE_POLICY = """\
podFailurePolicy:
  rules:
    # A restart does not help after a usage error ({usage}), or if the image has no working `python` (127, 126).
    - action: FailJob
      onExitCodes:
        containerName: {container}
        operator: In
        values:
          - {usage}
          - 126
          - 127
"""

_JOB = """\
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
  {failure_policy}
  template:
    metadata:
      labels:
        tfdist-job: {name}
    spec:
      {pod}
"""

_TRAINJOB = """\
# How each TrainJob that names this runtime runs. Kubeflow Trainer makes a JobSet of it, and the JobSet a job, a service
# and the pods {name}-{node}-0-0 and so on.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
    trainer.kubeflow.org/framework: tensorflow
spec:
  mlPolicy:
    numNodes: {size}
  template:
    spec:
      failurePolicy:
        # All pods are restarted together, this often. An eviction counts as a failure.
        maxRestarts: {restarts}
        rules:
          - name: usage
            action: FailJobSet
            onJobFailureReasons:
              - PodFailurePolicy
      replicatedJobs:
        - name: {node}
          replicas: 1
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              completionMode: Indexed
              # A pod that fails ends the job, and the JobSet restarts it.
              backoffLimit: 0
              {failure_policy}
              template:
                metadata:
                  labels:
                    tfdist-job: {name}
                spec:
                  {pod}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {name}
"""

_TFJOB = """\
# The operator makes a service for each pod, and writes their addresses into the TF_CONFIG of each.
apiVersion: kubeflow.org/v1
kind: TFJob
metadata:
  name: {name}
  labels:
    tfdist-job: {name}
spec:
  # Without a chief, the job has succeeded when all workers have.
  successPolicy: AllWorkers
  runPolicy:
    # When the job ends, its running pods, such as parameter servers, are deleted.
    cleanPodPolicy: Running
    # The job fails when its pods have failed this often, all together. With tfdist every process ends when one fails,
    # and each pod is restarted in its place.
    backoffLimit: {most_failures}
  tfReplicaSpecs:
    {replicas}
"""

_REPLICA = """\
{role}:
  replicas: {count}
  restartPolicy: {policy}
  template:
    metadata:
      labels:
        tfdist-job: {name}
    spec:
      {pod}
"""

_POD = """\
{head}automountServiceAccountToken: false
securityContext:
  # edit: if the image sets no user, or not by number, add `runAsUser: 1000`; if a volume belongs to root, add
  # `fsGroup: 1000`.
  runAsNonRoot: true
  seccompProfile:
    type: RuntimeDefault
containers:
  - name: {container}
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
      {environment}
    ports:
      - {port}
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
    {mounts}
{volumes}
"""

_WITHOUT_MOUNTS = """\
# volumeMounts:
    #   - name: runs
    #     mountPath: /runs"""

_WITH_MOUNTS = """\
volumeMounts:
      {mounts}
      # - name: runs
      #   mountPath: /runs"""

_WITHOUT_VOLUMES = """\
# volumes:
#   - name: runs
#     persistentVolumeClaim:
#       claimName: NAME"""

_WITH_VOLUMES = """\
volumes:
  {volumes}
  # - name: runs
  #   persistentVolumeClaim:
  #     claimName: NAME"""


def _refuse_hosts(job: Job, target: str, hint: str) -> None:
    if job.hosts:
        raise UsageError(f"`--hosts` is `{','.join(job.hosts)}` with `--emit {target}`", f"leave it out: {hint}")


def _kubernetes_name(job_name: str, ending: str) -> str:
    """The name of the objects; with `ending` it must not be longer than the name of a host."""
    name = KUBERNETES_PREFIX + job_name
    longest = MAX_LABEL_LENGTH - len(ending)
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


# What each value of `--emit` writes.
TARGETS = {"slurm": slurm, "kubernetes": kubernetes, "trainjob": trainjob, "tfjob": tfjob}
