"""The manifests of Kubeflow: a `TrainJob` of its Trainer 2, and a `TFJob` of its Training Operator 1."""

from __future__ import annotations

from tfdist.jobs.job_environment import RESTART
from tfdist.launcher.emit import pods
from tfdist.launcher.job import Job, refuse_hosts

# Kubeflow Trainer's name for the container that trains, and for the job of its pods.
NODE = "node"
TFJOB_ROLES = {"chief": "Chief", "worker": "Worker", "ps": "PS"}


def trainjob(job: Job, image: str = pods.IMAGE) -> str:
    """Returns manifests for Kubeflow Trainer 2.2: a secret, a network policy, a `TrainingRuntime` and a `TrainJob`.

    The arguments and errors are those of `kubernetes`.
    """
    refuse_hosts(job, "trainjob", pods.KUBERNETES_HINT)
    size = len(job.roles)
    # The names of pods end with the index and five random characters.
    name = pods.object_name(job.name, f"-{NODE}-0-{size - 1}-12345")
    # JobSet gives its pods a service with its own name.
    addresses = [f"{name}-{NODE}-0-{rank}.{name}:{pods.POD_PORT}" for rank in range(size)]
    pod = pods.specification(
        job,
        image,
        container=NODE,
        snippet=pods.start_by_rank(job),
        environment=[
            *pods.cluster_variable(job, addresses),
            *pods.shared_variables(job, name),
            "# The number of restarts of the job; above 0, tfdist.train continues from its last checkpoint.",
            *pods.field(RESTART, "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"),
        ],
        head=["restartPolicy: Never"],
    )
    parts = {"name": name, "size": size, "restarts": job.restarts, "node": NODE}
    return "".join(
        [
            pods.preamble("Kubeflow Trainer 2.2", name, size),
            _TRAINJOB.format(
                failure_policy=pods.indented(pods.failure_policy(NODE), 14), pod=pods.indented(pod, 18), **parts
            ),
        ]
    )


def tfjob(job: Job, image: str = pods.IMAGE) -> str:
    """Returns manifests for Kubeflow's Training Operator 1: a secret, a network policy and a `TFJob`.

    The arguments and errors are those of `kubernetes`.
    """
    refuse_hosts(job, "tfjob", pods.KUBERNETES_HINT)
    size = len(job.roles)
    name = pods.object_name(job.name, f"-worker-{size - 1}")
    pod = pods.specification(
        job,
        image,
        container="tensorflow",
        snippet=_COUNT_RESTARTS if job.restarts else 'exec python "$@"\n',
        environment=pods.shared_variables(job, name),
        mounts=["- name: restarts", "  mountPath: /restarts"] if job.restarts else [],
        volumes=["- name: restarts", "  emptyDir: {}"] if job.restarts else [],
        port_name="tfjob-port",
    )
    counts = {role: sum(other == role for other, _ in job.roles) for role in ("chief", "worker", "ps")}
    policy = "OnFailure" if job.restarts else "Never"
    replicas = "".join(
        _REPLICA.format(role=TFJOB_ROLES[role], count=count, policy=policy, pod=pods.indented(pod, 6), name=name)
        for role, count in counts.items()
        if count
    )
    return "".join(
        [
            pods.preamble("Kubeflow's Training Operator 1.9", name, size),
            # A failure of the job is a failure of each pod, and the operator counts those of all pods together.
            _TFJOB.format(
                name=name,
                most_failures=job.restarts * size + 1 if job.restarts else 0,
                replicas=pods.indented(replicas, 4),
            ),
        ]
    )


# The operator has no variable for it. The volume lives as long as the pod, which keeps its place after a failure.
_COUNT_RESTARTS = """\
read -r TFDIST_RESTART < /restarts/count || TFDIST_RESTART=0
export TFDIST_RESTART
echo $((TFDIST_RESTART + 1)) > /restarts/count
exec python "$@"
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
