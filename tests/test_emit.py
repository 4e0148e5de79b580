"""What is emitted runs: the script for Slurm under a stand-in for `srun`, a pod as Kubernetes starts it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from tests.manifests import documents, pods_of_job, pods_of_tfjob, pods_of_trainjob
from tfdist import launch
from tfdist.errors import UsageError
from tfdist.launcher import emit
from tfdist.launcher.emit.pods import POD_PORT
from tfdist.launcher.job import Job

WORLD = ("-m", "tfdist.world")
# Prints its arguments, so that what came through all the quoting can be compared.
ECHO = ("-c", "import json, sys; print(json.dumps(sys.argv[1:]))")
HARD_TO_QUOTE = (
    "two words",
    "it's",
    'a "word"',
    "$HOME",
    "$(HOME)",
    "$$",
    "`id`",
    "back\\slash",
    "\\U0001F600",
    "*",
    "",
    "#",
    "- a: b",
    "é 😀",
    "two\nlines",
    "\ttab",
    "\x7f\u2028",
    "'''",
    "&& exit 1",
    "{name}",
)

# Runs every task on this machine, one after the other. Its exit code is that of a task that failed.
SRUN = """\
#!/bin/sh
echo "srun $*" >> "$RECORD"
while case "$1" in --*) true;; *) false;; esac; do shift; done
rank=0 code=0
while [ "$rank" -lt "$SLURM_NTASKS" ]; do
  out=$(SLURM_PROCID=$rank SLURM_LOCALID=0 "$@") || code=$?
  printf '%s\\n' "$out" | sed "s/^/$rank: /"
  rank=$((rank + 1))
done
exit $code
"""


def run_slurm(script, tmp_path, size, **more):
    """Runs an emitted script as Slurm would, with a node for each of `size` tasks; returns it and what it called."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", '#!/bin/sh\necho "scontrol $*" >> "$RECORD"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    record.write_text("")
    (tmp_path / "job.sh").write_text(script)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": str(size), "SLURM_JOB_NODELIST": f"gpu[1-{size}]"}
    done = subprocess.run(
        ["bash", tmp_path / "job.sh"],
        env=slurm | {"PATH": f"{folder}:{path()}", "RECORD": str(record)} | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, record.read_text().splitlines()


@pytest.mark.parametrize("target", emit.TARGETS)
def test_an_elastic_job_is_not_emitted_as_one_that_is_not(target):
    done = CliRunner().invoke(launch.command, ["--elastic", "--emit", target, "script.py"])
    assert done.exit_code == 2
    assert f"`--elastic` and `--emit {target}` are both set" in done.output and "hint: use `--restarts`" in done.output


@pytest.mark.parametrize(
    "options", [["--mpi"], ["--expose"], ["--verbose"], ["--log-dir", "logs"], ["--ssh-options", "-v"]]
)
def test_options_of_the_launcher_that_a_scheduler_would_ignore_are_refused(options):
    done = CliRunner().invoke(launch.command, [*options, "--emit", "kubernetes", "script.py"])
    assert done.exit_code == 2
    assert f"error: `{options[0]}` and `--emit kubernetes` are both set" in done.output and "\nhint: " in done.output


def path():
    """A PATH on which `python` is the one that runs this test."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def seen(output):
    """What a process that printed its world took itself for."""
    (line,) = re.findall(r"rank (\d+) +(\w+ \d+) \((.*)\), this process", output)
    return line


def sbatch_options(script):
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.MULTILINE))


@pytest.mark.parametrize("restarts", [0, 2], ids=["no restarts", "restarts"])
@pytest.mark.parametrize("ps", [0, 2], ids=["workers", "parameter servers"])
def test_a_script_for_slurm_is_bash(ps, restarts, tmp_path):
    (tmp_path / "job.sh").write_text(emit.slurm(Job(HARD_TO_QUOTE, workers=3, ps=ps, restarts=restarts)))
    done = subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_slurm_is_asked_for_a_task_a_process():
    options = sbatch_options(emit.slurm(Job(WORLD, workers=3, ps=2)))
    assert options["ntasks"] == options["nodes"] == "6"
    assert options["output"] == "%x-%j.out"
    assert "requeue" not in options and "no-requeue" in options
    assert "requeue" in sbatch_options(emit.slurm(Job(WORLD, restarts=1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("restarts", [0, 2], ids=["no restarts", "restarts"])
@pytest.mark.parametrize(
    ("workers", "ps", "roles"),
    [
        (1, 0, None),
        (3, 0, ["worker 0", "worker 1", "worker 2"]),
        (2, 1, ["chief 0", "worker 0", "worker 1", "ps 0"]),
    ],
    ids=["one", "workers", "parameter servers"],
)
def test_every_process_of_slurm_knows_who_it_is(workers, ps, roles, restarts, tmp_path):
    job = Job(WORLD, workers=workers, ps=ps, restarts=restarts)
    done, calls = run_slurm(emit.slurm(job), tmp_path, len(job.roles))
    assert done.returncode == 0, done.stderr
    assert calls == ["srun --kill-on-bad-exit=1 --label --distribution=block python -m tfdist.world"]
    if roles is None:
        assert re.search("rank +0 of 1", done.stdout)
        return
    outputs = [re.sub(f"(?m)^(?!{rank}: ).*\n", "", done.stdout) for rank in range(len(roles))]
    assert [seen(output) for output in outputs] == [
        (str(rank), role, f"gpu{rank + 1}:20112") for rank, role in enumerate(roles)
    ]


def test_slurm_runs_the_command_as_it_was_given(tmp_path):
    done, _ = run_slurm(emit.slurm(Job(ECHO + HARD_TO_QUOTE, workers=2)), tmp_path, 2)
    assert [json.loads(line[3:]) for line in done.stdout.splitlines()] == [list(HARD_TO_QUOTE)] * 2


def test_a_job_of_slurm_tells_its_name_and_its_patience(tmp_path):
    code = "import os; print(os.environ['TFDIST_JOB'], os.environ['TFDIST_START_SECONDS'])"
    done, _ = run_slurm(emit.slurm(Job(("-c", code), workers=1, start_seconds=1.5)), tmp_path, 1)
    assert done.stdout == "0: slurm-7 1.5\n"


@pytest.mark.parametrize(
    ("code", "count", "requeued"),
    [(3, None, True), (3, "1", True), (3, "2", False), (0, None, False), (0, "2", False), (2, None, False)],
    ids=["first failure", "second", "last", "success", "success at last", "wrong input"],
)
def test_a_job_of_slurm_goes_back_into_the_queue_so_often(code, count, requeued, tmp_path):
    # One of the processes fails.
    program = "import os, sys; print(os.environ['TFDIST_RESTART']); sys.exit(int(os.environ['SLURM_PROCID']) * {})"
    more = {} if count is None else {"SLURM_RESTART_COUNT": count}
    job = Job(("-c", program.format(code)), workers=2, restarts=2)
    done, calls = run_slurm(emit.slurm(job), tmp_path, 2, **more)
    assert done.returncode == code
    assert done.stdout == f"0: {count or 0}\n1: {count or 0}\n"
    assert calls[1:] == (["scontrol requeue 7"] if requeued else [])


def test_a_job_that_slurm_has_restarted_too_often_ends(tmp_path):
    # Slurm counts the restarts after a node has failed too.
    done, calls = run_slurm(emit.slurm(Job(WORLD, restarts=2)), tmp_path, 2, SLURM_RESTART_COUNT="3")
    assert (done.returncode, calls) == (1, [])
    assert "restarted this job 3 times; at most 2 restarts" in done.stderr


def test_a_job_without_restarts_fails_with_its_program(tmp_path):
    done, calls = run_slurm(emit.slurm(Job(("-c", "import sys; sys.exit(5)"))), tmp_path, 2)
    assert done.returncode == 5 and len(calls) == 1


def test_a_step_takes_the_cores_that_its_job_was_given(tmp_path):
    job = Job(("-c", "import os; print(os.environ.get('SRUN_CPUS_PER_TASK'))"), workers=1)
    assert run_slurm(emit.slurm(job), tmp_path, 1)[0].stdout == "0: None\n"
    assert run_slurm(emit.slurm(job), tmp_path, 1, SLURM_CPUS_PER_TASK="8")[0].stdout == "0: 8\n"


def manifests(job, target="kubernetes", **options):
    return documents(emit.TARGETS[target](job, **options))


# What each of Kubernetes' targets makes, and the pods that come of it.
PODS = {"kubernetes": pods_of_job, "trainjob": pods_of_trainjob, "tfjob": pods_of_tfjob}
every_target = pytest.mark.parametrize("target", PODS)


def run_pod(target, known, index, *, more=None, **options):
    """Runs the command of pod `index` as its node would, with nothing of this environment but PATH."""
    _, command, variables = list(PODS[target](known, **options))[index]
    return output(command, env={"PATH": path(), **variables, **(more or {})})


def output(command, **options):
    """What a command prints, which ends well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("workers", "ps"), [(3, 0), (2, 1)], ids=["workers", "parameter servers"])
@every_target
def test_every_pod_knows_who_it_is(target, workers, ps):
    job = Job(WORLD, workers=workers, ps=ps, name="demo")
    known = manifests(job, target)
    pods = list(PODS[target](known))
    assert len(pods) == len(job.roles)
    for rank, (role, index) in enumerate(job.roles):
        assert seen(run_pod(target, known, rank)) == (str(rank), f"{role} {index}", f"{address(pods[rank][0])}:2222")


def address(host):
    """The name by which the pods of a plain Job call each other: that of the service is part of it."""
    return host if "." in host else f"{host}.{host.rpartition('-')[0]}"


@every_target
def test_a_pod_runs_the_command_as_it_was_given(target):
    known = manifests(Job(ECHO + HARD_TO_QUOTE, name="demo"), target)
    assert json.loads(run_pod(target, known, 1, more={"HOME": "/root"})) == list(HARD_TO_QUOTE)


@pytest.mark.parametrize("target", ["kubernetes", "trainjob"])
def test_a_pod_knows_its_job_its_restarts_and_its_patience(target):
    names = ["TFDIST_JOB", "TFDIST_RESTART", "TFDIST_START_SECONDS"]
    job = Job(("-c", f"import os; print(*map(os.environ.get, {names}))"), start_seconds=600.0, name="07")
    assert run_pod(target, manifests(job, target), 0, restarts=2) == "07 2 600\n"


def test_a_pod_of_a_tfjob_counts_its_restarts_where_they_outlive_its_container(tmp_path):
    job = Job(("-c", "import os; print(os.environ['TFDIST_RESTART'])"), restarts=2, name="demo")
    known = manifests(job, "tfjob")
    pod = known["TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "restarts", "emptyDir": {}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "restarts", "mountPath": "/restarts"}]
    _, command, variables = next(pods_of_tfjob(known))
    here = [word.replace("/restarts/", f"{tmp_path}/") for word in command]  # where its volume is
    assert [output(here, env={"PATH": path(), **variables}) for _ in range(3)] == ["0\n", "1\n", "2\n"]


def test_the_processes_of_a_job_share_a_secret_of_their_own(tmp_path):
    job = Job(("-c", "import os; print(os.environ['TFDIST_SECRET'])"), name="demo")
    lines = run_slurm(emit.slurm(job), tmp_path, 2)[0].stdout.splitlines()
    assert lines[0][3:] == lines[1][3:] and re.fullmatch("[0-9a-f]{64}", lines[0][3:])
    for target in PODS:
        known, others = manifests(job, target), manifests(job, target)
        of_pods = [run_pod(target, known, rank).strip() for rank in range(2)]
        assert of_pods[0] == of_pods[1] and re.fullmatch("[0-9a-f]{64}", of_pods[0])
        assert run_pod(target, others, 0).strip() != of_pods[0]


def test_the_parts_of_a_job_find_each_other():
    known = manifests(Job(WORLD, workers=2, ps=1, restarts=3, name="demo"), image='a "b":1')
    assert list(known) == ["Secret", "NetworkPolicy", "Service", "Job"]
    policy, service, job = (known[kind] for kind in ("NetworkPolicy", "Service", "Job"))
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert policy["spec"] == {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": labels}}]}],
    }
    assert service["spec"]["selector"] == labels
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True  # pods look each other up before any is ready
    assert pod["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    (container,) = pod["containers"]
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == POD_PORT
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 4
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], pod["restartPolicy"]) == (3, 0, "Never")
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [2, 126, 127]
    assert container["image"] == 'a "b":1'


def pod_templates(known):
    """The templates of the pods, wherever they are in the documents."""
    if isinstance(known, list):
        return [template for part in known for template in pod_templates(part)]
    if not isinstance(known, dict):
        return []
    if "containers" in known.get("spec", {}):
        return [known]
    return [template for part in known.values() for template in pod_templates(part)]


def test_a_trainjob_is_restarted_as_a_job_and_not_after_a_usage_error():
    known = manifests(Job(WORLD, workers=3, restarts=2, name="demo"), "trainjob")
    assert list(known) == ["Secret", "NetworkPolicy", "TrainingRuntime", "TrainJob"]
    jobset = known["TrainingRuntime"]["spec"]["template"]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 2
    (rule,) = jobset["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = jobset["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    (rule,) = job["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 126, 127])
    assert rule["onExitCodes"]["containerName"] == job["template"]["spec"]["containers"][0]["name"]


@pytest.mark.parametrize(("restarts", "policy", "failures"), [(0, "Never", 0), (2, "OnFailure", 9)])
def test_a_tfjob_counts_the_failures_of_all_pods(restarts, policy, failures):
    known = manifests(Job(WORLD, workers=2, ps=1, restarts=restarts, name="demo"), "tfjob")
    assert list(known) == ["Secret", "NetworkPolicy", "TFJob"]
    spec = known["TFJob"]["spec"]
    assert spec["runPolicy"]["backoffLimit"] == failures
    replicas = spec["tfReplicaSpecs"]
    assert {role: replica["replicas"] for role, replica in replicas.items()} == {"Chief": 1, "Worker": 2, "PS": 1}
    assert {replica["restartPolicy"] for replica in replicas.values()} == {policy}


@every_target
def test_only_the_pods_of_the_job_may_connect(target):
    known = manifests(Job(WORLD, ps=1, name="demo"), target)
    labels = {"tfdist-job": "tfdist-demo"}
    assert known["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": labels}
    assert known["NetworkPolicy"]["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert [template["metadata"]["labels"] for template in pod_templates(known)] == [labels] * (
        3 if target == "tfjob" else 1
    )


@every_target
def test_a_pod_has_few_rights(target):
    pod = pod_templates(manifests(Job(WORLD, name="demo"), target))[0]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl, and no cluster")
def test_kubectl_reads_the_same_and_knows_every_field():
    text = emit.kubernetes(Job(HARD_TO_QUOTE, ps=1, name="demo"))
    mine = list(documents(text).values())

    # What needs no cluster: `label` keeps all that it reads, `set env` only what it knows, and adds what is left out.
    def kubectl(*arguments, of):
        return output(["kubectl", *arguments, "--local", "-f", "-", "-o", "json"], input=of)

    read, rest = [], kubectl("label", "a=b", of=text)
    while rest.strip():
        document, end = json.JSONDecoder().raw_decode(rest.lstrip())
        del document["metadata"]["labels"]["a"]
        read, rest = [*read, document], rest.lstrip()[end:]
    assert read == mine
    known = json.loads(kubectl("set", "env", "A=b", of=json.dumps(mine[3])))
    assert known["spec"]["template"]["spec"]["containers"][0]["env"].pop() == {"name": "A", "value": "b"}
    assert contains(known, mine[3])


def contains(whole, part):
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return bool(whole == part)


@pytest.mark.parametrize("target", emit.TARGETS)
def test_hosts_are_the_schedulers_choice(target):
    with pytest.raises(UsageError, match=rf"`--hosts` is `a,b` with `--emit {target}`(?s:.*)hint: leave it out"):
        emit.TARGETS[target](Job(WORLD, hosts=("a", "b")))


@pytest.mark.parametrize("name", ["My_job", "a.b", "a-", "a" * 60, "", "a\n"])
def test_a_name_that_kubernetes_does_not_take_is_refused(name):
    with pytest.raises(UsageError, match=r"which Kubernetes does not allow(?s:.*)at most 54 lowercase letters"):
        emit.kubernetes(Job(WORLD, name=name))


def test_the_longest_name_that_kubernetes_takes():
    assert len(manifests(Job(WORLD, name="a" * 54))["Job"]["metadata"]["name"] + "-1") == 63
    with pytest.raises(UsageError, match="use at most 41 lowercase letters"):
        emit.trainjob(Job(WORLD, name="a" * 42))
    # The names of its pods, which end in five random characters.
    assert (
        len(manifests(Job(WORLD, name="a" * 41), "trainjob")["TrainJob"]["metadata"]["name"] + "-node-0-1-12345") == 63
    )
    assert len(next(pods_of_tfjob(manifests(Job(WORLD, name="a" * 47), "tfjob")))[0].split(".")[0]) == 63


def test_an_unknown_target_is_named_with_the_known_ones():
    done = CliRunner().invoke(launch.command, ["--emit", "mesos", "script.py"])
    assert done.exit_code == 2
    assert "hint: use `slurm`, `kubernetes`, `trainjob`, `tfjob`" in done.output


def test_the_command_prints_what_is_emitted():
    done = CliRunner().invoke(launch.command, ["--workers", "3", "--emit", "tfjob", "-m", "tfdist.world"])
    assert done.exit_code == 0
    assert [len(list(pods_of_tfjob(documents(done.output)))), done.output[0]] == [3, "#"]


@pytest.mark.parametrize("ps", [0, 1], ids=["workers", "parameter servers"])
def test_the_models_of_kubeflow_know_every_field(ps):
    """The packages that Kubeflow generates from its definitions drop what they do not know."""
    trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="needs `pip install kubeflow-trainer-api`")
    training = pytest.importorskip("kubeflow.training", reason="needs `pip install kubeflow-training`")
    job = Job(HARD_TO_QUOTE, ps=ps, restarts=2, name="demo")
    known = manifests(job, "trainjob")
    for model in (trainer.TrainerV1alpha1TrainJob, trainer.TrainerV1alpha1TrainingRuntime):
        emitted = known[model.__name__.removeprefix("TrainerV1alpha1")]
        assert contains(json.loads(model.from_dict(emitted).to_json()), emitted)
    emitted = manifests(job, "tfjob")["TFJob"]
    client = training.ApiClient()
    read = client.deserialize(SimpleNamespace(data=json.dumps(emitted)), "KubeflowOrgV1TFJob")
    assert contains(client.sanitize_for_serialization(read), emitted)
