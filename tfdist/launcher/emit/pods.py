"""What the manifests of Kubernetes and of Kubeflow share: names, secret and network policy, and the pods."""

from __future__ import annotations

import json
import re
import secrets
import textwrap

from tfdist.errors import EXIT_USAGE, UsageError
from tfdist.jobs.job_environment import JOB, SECRET, START_SECONDS
from tfdist.launcher.job import SECRET_BYTES, Job

IMAGE = "registry.example.com/tfdist:edit-me"

# Every pod has its own address, so that all can listen on the same port.
POD_PORT = 2222

# The longest name that Kubernetes allows for a service and for a host; a pod's host name ends with the pod's index.
MAX_LABEL_LENGTH = 63
KUBERNETES_PREFIX = "tfdist-"
KUBERNETES_HINT = "Kubernetes chooses the nodes; `nodeSelector` in the manifest narrows them"

# Kubernetes replaces only `$(NAME)`; it leaves `$rank` and `$((rank - 1))` unchanged.
_START_BY_RANK = """\
rank=$JOB_COMPLETION_INDEX
{role}
export TF_CONFIG='{{"cluster": '"$CLUSTER"', "task": {{"type": "'"$role"'", "index": '"$index"'}}}}'
exec python "$@"
"""


def preamble(needs: str, name: str, size: int) -> str:
    """What all manifests begin with: a comment, the secret of the job, and the network policy of its pods."""
    secret = secrets.token_hex(SECRET_BYTES)
    return _HEAD.format(needs=needs, size=size) + _SECRET_AND_POLICY.format(secret=secret, name=name)


def start_by_rank(job: Job) -> str:
    """Shell code that computes a pod's role from its index, in the order of `job.roles`, and starts the program."""
    if not job.ps:
        return _START_BY_RANK.format(role="role=worker index=$rank")
    role = (
        "if [ $rank -eq 0 ]; then role=chief index=0\n"
        f"elif [ $rank -le {job.workers} ]; then role=worker index=$((rank - 1))\n"
        f"else role=ps index=$((rank - {job.workers + 1})); fi"
    )
    return _START_BY_RANK.format(role=role)


def cluster_variable(job: Job, addresses: list[str]) -> list[str]:
    """The lines of the variable from which the shell of a pod makes its TF_CONFIG."""
    return ["- name: CLUSTER", "  value: |-", f"    {json.dumps(job.cluster(addresses))}"]


def shared_variables(job: Job, name: str) -> list[str]:
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


def field(name: str, path: str) -> list[str]:
    """The lines of a variable whose value is a field of the pod."""
    return [f"- name: {name}", "  valueFrom:", "    fieldRef:", f"      fieldPath: {path}"]


def indented(text: str, spaces: int) -> str:
    """A block for a template whose own line is indented already."""
    return textwrap.indent(text, " " * spaces).strip()


def specification(
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
    extra = {
        "mounts": indented("\n".join(mounts or []), 6),
        "volumes": indented("\n".join(volumes or []), 2),
    }
    return _POD.format(
        head="".join(f"{line}\n" for line in head or []),
        container=container,
        image=_quoted(image),
        snippet=indented(snippet, 8),
        # Kubernetes expands `$(NAME)` in an argument, and replaces `$$` by a dollar.
        arguments=indented("\n".join(f"- {_quoted(word.replace('$', '$$'))}" for word in job.command), 6),
        environment=indented("\n".join(environment), 6),
        port=f"name: {port_name}\n        containerPort: {POD_PORT}" if port_name else f"containerPort: {POD_PORT}",
        mounts=_WITH_MOUNTS.format(**extra) if mounts else _WITHOUT_MOUNTS,
        volumes=_WITH_VOLUMES.format(**extra) if volumes else _WITHOUT_VOLUMES,
    )


def failure_policy(container: str) -> str:
    """The policy by which a failure that a restart cannot mend ends the job."""
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


def object_name(job_name: str, ending: str) -> str:
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
