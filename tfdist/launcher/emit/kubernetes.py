"""The manifests of a job of Kubernetes itself."""

from __future__ import annotations

from tfdist.jobs.job_environment import RESTART
from tfdist.launcher.emit import pods
from tfdist.launcher.job import Job, refuse_hosts


def kubernetes(job: Job, image: str = pods.IMAGE) -> str:
    """Returns manifests for `kubectl apply`: a secret, a network policy, a service that names the pods, and the job.

    Args:
        job: the job.
        image: the container image, with `sh`, and with a `python` that has tfdist and the program.

    Raises:
        UsageError: the job names hosts, although Kubernetes chooses them, or has a name that Kubernetes does not allow.
    """
    refuse_hosts(job, "kubernetes", pods.KUBERNETES_HINT)
    size = len(job.roles)
    name = pods.object_name(job.name, f"-{size - 1}")
    addresses = [f"{name}-{rank}.{name}:{pods.POD_PORT}" for rank in range(size)]
    pod = pods.specification(
        job,
        image,
        container="tfdist",
        snippet=pods.start_by_rank(job),
        environment=[
            *pods.cluster_variable(job, addresses),
            *pods.shared_variables(job, name),
            "# The number of restarts of this pod; above 0, tfdist.train continues from its last checkpoint.",
            *pods.field(RESTART, "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"),
        ],
        head=[f"subdomain: {name}", "restartPolicy: Never"],
    )
    parts = {"name": name, "size": size, "port": pods.POD_PORT, "restarts": job.restarts}
    return "".join(
        [
            pods.preamble("Kubernetes 1.29", name, size),
            _SERVICE.format(**parts),
            _JOB.format(
                failure_policy=pods.indented(pods.failure_policy("tfdist"), 2), pod=pods.indented(pod, 6), **parts
            ),
        ]
    )


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
