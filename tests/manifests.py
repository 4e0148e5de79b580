"""What Kubernetes and the controllers of Kubeflow make of manifests: the command and the environment of each pod."""

import json
import re

import yaml


def documents(text):
    """The documents of a text, by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods_of_job(known, restarts=0):
    """The pods that Kubernetes makes for a Job with an index per pod."""
    job = known["Job"]
    name = job["metadata"]["name"]
    annotations = {"batch.kubernetes.io/job-index-failure-count": str(restarts)}
    for index in range(job["spec"]["completions"]):
        # The Job's controller adds the index after the other variables.
        added = {"JOB_COMPLETION_INDEX": str(index)}
        yield _pod(known, f"{name}-{index}", job["spec"]["template"], added, annotations)


def pods_of_trainjob(known, restarts=0):
    """The pods of a TrainJob: Kubeflow Trainer makes a JobSet of its runtime, and that an indexed Job."""
    trainjob, runtime = known["TrainJob"], known["TrainingRuntime"]
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    name = trainjob["metadata"]["name"]
    annotations = {"jobset.sigs.k8s.io/restart-attempt": str(restarts)}
    for index in range(runtime["spec"]["mlPolicy"]["numNodes"]):
        host = f"{name}-{replicated['name']}-0-{index}.{name}"  # the service of a JobSet has its name
        added = {"JOB_COMPLETION_INDEX": str(index)}
        yield _pod(known, host, replicated["template"]["spec"]["template"], added, annotations)


def pods_of_tfjob(known, namespace="default"):
    """The pods of a TFJob, whose operator writes TF_CONFIG; an evaluator is not part of its cluster."""
    tfjob = known["TFJob"]
    replicas = tfjob["spec"]["tfReplicaSpecs"]
    hosts = {
        role: [
            f"{tfjob['metadata']['name']}-{role.lower()}-{index}.{namespace}.svc" for index in range(spec["replicas"])
        ]
        for role, spec in replicas.items()
    }
    cluster = {
        role.lower(): [f"{host}:{_port(replicas[role])}" for host in hosts[role]]
        for role in hosts
        if role != "Evaluator"
    }
    for role, spec in replicas.items():
        for index, host in enumerate(hosts[role]):
            config = {"cluster": cluster, "task": {"type": role.lower(), "index": index}, "environment": "cloud"}
            yield _pod(known, host, spec["template"], {"TF_CONFIG": json.dumps(config)}, {})


def _port(replica):
    (container,) = [each for each in replica["template"]["spec"]["containers"] if each["name"] == "tensorflow"]
    return next(port["containerPort"] for port in container["ports"] if port["name"] == "tfjob-port")


def _pod(known, host, template, added, annotations):
    """The name, the command and the variables of a pod, as its node starts it."""
    (container,) = template["spec"]["containers"]
    variables = {}
    for variable in container["env"]:
        if "value" in variable:
            variables[variable["name"]] = expanded(variable["value"], variables)
        elif "secretKeyRef" in variable["valueFrom"]:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == known["Secret"]["metadata"]["name"]
            variables[variable["name"]] = known["Secret"]["stringData"][reference["key"]]
        else:
            (name,) = re.findall(r"metadata\.annotations\['(.*)'\]", variable["valueFrom"]["fieldRef"]["fieldPath"])
            variables[variable["name"]] = annotations[name]
    variables |= added
    return host, [expanded(word, variables) for word in container["command"] + container["args"]], variables


def expanded(text, variables):
    """A text with its variables, as Kubernetes replaces them in commands, arguments and values."""
    return re.sub(r"\$(?:(\$)|\(([^)]*)\))", lambda found: found[1] or str(variables.get(found[2], found[0])), text)
