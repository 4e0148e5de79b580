"""Clusters as tables of environments, without processes: what is detected, and what is refused with which words."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as some

from tfdist import world
from tfdist.errors import EXIT_USAGE, UsageError
from tfdist.groups import horovod
from tfdist.jobs.slurm import expand_hosts
from tfdist.jobs.tf_config import ROLES, Task
from tfdist.jobs.world import World

# Other tests may have the cores at the same time.
quick = settings(deadline=None, max_examples=50)

A, B, C = "10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222"


@pytest.fixture(autouse=True)
def _clean_keras():
    """Nothing here touches Keras; without its cleaning a table of environments takes no time."""


def tf_config(cluster, role="worker", index=0, **more):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, **more})}


def slurm(rank, size, nodes="n[1-2]", **more):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(size),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": nodes,
        **{name: str(value) for name, value in more.items()},
    }


def vertex(pools, pool, index=0):
    task = {"type": pool, "index": index, "trial": "TRIAL_ID"}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools, "environment": "cloud", "task": task, "job": {}})}


def sagemaker(hosts, current):
    return {"SM_HOSTS": hosts, "SM_CURRENT_HOST": current}


def places(world):
    return world.rank, world.world_size, world.local_rank, world.local_world_size


class TestClusterFile:
    """In place of TF_CONFIG, where that would be too long for a variable."""

    @pytest.fixture
    def environment(self, tmp_path):
        (tmp_path / "cluster.json").write_text(json.dumps({"worker": [A, B]}))
        return {"TFDIST_CLUSTER": str(tmp_path / "cluster.json"), "TFDIST_TASK": '{"type": "worker", "index": 1}'}

    def test_it_says_what_tf_config_would(self, environment):
        assert World.detect(environment) == World.detect(tf_config({"worker": [A, B]}, index=1))

    def test_a_tf_config_beside_it_counts(self, environment):
        assert World.detect(environment | tf_config({"worker": [C]})).task.address == C

    def test_one_that_is_gone_is_named(self, environment):
        environment["TFDIST_CLUSTER"] = "/nowhere"
        with pytest.raises(UsageError, match="`TFDIST_CLUSTER` is `/nowhere`, which cannot be read: No such file"):
            World.detect(environment)

    def test_one_without_a_task_is_refused(self, environment):
        del environment["TFDIST_TASK"]
        with pytest.raises(UsageError, match="has `null` as `task`"):
            World.detect(environment)


class TestAlone:
    @pytest.mark.parametrize(
        "environment",
        [{}, {"TF_CONFIG": ""}, {"TF_CONFIG": " \n"}, {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}],
        ids=["nothing", "empty", "blank", "a shell in an allocation of Slurm"],
    )
    def test_a_process_without_a_cluster_is_alone(self, environment):
        assert World.detect(environment) == World()

    def test_one_process_has_no_task_and_an_empty_tf_config(self):
        world = World()
        assert (world.task, world.tasks_of("worker"), world.cluster(), world.tf_config()) == (None, (), {}, "{}")
        assert world.is_chief
        assert world.named(0) == "rank 0"

    @pytest.mark.parametrize("size", ["SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"])
    def test_a_slurm_job_with_one_task_is_a_world_of_one(self, size):
        world = World.detect({"SLURM_PROCID": "0", size: "1"})
        assert world == World(source=f"Slurm ({size})")

    def test_a_step_of_one_task_in_a_larger_job_is_a_world_of_one(self):
        assert World.detect(slurm(0, 4, SLURM_STEP_NUM_TASKS=1)).world_size == 1


# Cluster, this task, and then rank, world size, local rank, local world size.
TF_CONFIG_DETECTED = {
    "one worker": ({"worker": [A]}, "worker", 0, (0, 1, 0, 1)),
    "the second of two hosts": ({"worker": [A, B]}, "worker", 1, (1, 2, 0, 1)),
    "the second on a host": ({"worker": [A, "10.0.0.1:2223", B]}, "worker", 1, (1, 3, 1, 2)),
    "a chief before workers": ({"worker": [A, B], "chief": [C]}, "worker", 0, (1, 3, 0, 1)),
    "servers after workers": ({"ps": [A], "worker": [B], "chief": [C]}, "ps", 0, (2, 3, 0, 1)),
    "servers without a chief": ({"ps": [A], "worker": [B]}, "worker", 0, (0, 2, 0, 1)),
    "every name of one machine": (
        {"worker": ["localhost:1", "127.0.0.1:2", "[::1]:3", "127.0.0.2:4"]},
        "worker",
        2,
        (2, 4, 2, 4),
    ),
    "a host in two spellings": ({"worker": ["Node:1", "node:2"]}, "worker", 1, (1, 2, 1, 2)),
    "IPv6": ({"worker": ["[2001:db8::1]:1", "[2001:db8::2]:1"]}, "worker", 1, (1, 2, 0, 1)),
    "an empty role": ({"worker": [A, B], "ps": []}, "worker", 1, (1, 2, 0, 1)),
    "an evaluator among the addresses": ({"chief": [A], "worker": [B], "evaluator": [C]}, "worker", 0, (1, 2, 0, 1)),
    "localhost among evaluators": ({"worker": [A, B], "evaluator": ["localhost:1"]}, "worker", 1, (1, 2, 0, 1)),
}

# As the platforms write them, from the sources that are named: TF_CONFIG, the rank, and the tasks by rank.
TF_CONFIG_OF_PLATFORMS = {
    # kubeflow/training-operator, pkg/controller.v1/tensorflow/tensorflow.go: roles in lower case, no evaluator.
    "a TFJob with a master": (
        {
            "cluster": {"master": ["j-master-0.ns.svc:2222"], "worker": ["j-worker-0.ns.svc:2222"]},
            "task": {"type": "worker", "index": 0},
            "environment": "cloud",
        },
        1,
        ["chief 0 (j-master-0.ns.svc:2222)", "worker 0 (j-worker-0.ns.svc:2222)"],
    ),
    # aws/sagemaker-tensorflow-training-toolkit, src/sagemaker_tensorflow_container/training.py
    "SageMaker's parameter servers": (
        {
            "cluster": {
                "master": ["algo-1:2222"],
                "ps": ["algo-1:2223", "algo-2:2223"],
                "worker": ["algo-2:2222"],
            },
            "environment": "cloud",
            "task": {"index": 0, "type": "master"},
        },
        0,
        ["chief 0 (algo-1:2222)", "worker 0 (algo-2:2222)", "ps 0 (algo-1:2223)", "ps 1 (algo-2:2223)"],
    ),
    # tf.train.ClusterSpec: "a dictionary mapping task indices to network addresses"
    "addresses by index": (
        {"cluster": {"worker": {"1": "b:1", "0": "a:1"}}, "task": {"type": "worker", "index": 1}},
        1,
        ["worker 0 (a:1)", "worker 1 (b:1)"],
    ),
    "a sparse cluster of all": (
        {"sparseCluster": {"worker": {"1": "b:1", "0": "a:1"}, "ps": []}, "task": {"type": "worker", "index": 0}},
        0,
        ["worker 0 (a:1)", "worker 1 (b:1)"],
    ),
}

# The text of TF_CONFIG, and what the message says of it.
TF_CONFIG_REFUSED = {
    "not JSON": ("{'worker'", "`TF_CONFIG` is `{'worker'`, which is not JSON: Expecting property name"),
    "very deep": ("[" * 100_000, "which is not JSON"),
    "a number of 5000 digits": ("9" * 5000, "which is not JSON"),
    "a list": ("[1]", "`TF_CONFIG` is `[1]`, which is not an object"),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', "`TF_CONFIG` lacks `cluster`"),
    "no task": ('{"cluster": {"worker": ["a:1"]}}', "`TF_CONFIG` lacks `task`"),
    "nothing": ("{}", "`TF_CONFIG` lacks `cluster`"),
    "no type": ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 0}}', "lacks `task.type`"),
    "no index": ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}', "lacks `task.index`"),
    "a task that is a text": (
        '{"cluster": {"worker": ["a:1"]}, "task": "worker"}',
        '`TF_CONFIG` has `"worker"` as `task`, which is not an object',
    ),
    "a type that is a number": (
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": 1, "index": 0}}',
        "has `1` as `task.type`, which is not a text",
    ),
    "an index in quotes": (
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "0"}}',
        '`TF_CONFIG` has `"0"` as `task.index`, which is not a whole number',
    ),
    "an index with a fraction": (
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0.5}}',
        "has `0.5` as `task.index`",
    ),
    "a cluster that is a list": (
        '{"cluster": ["a:1"], "task": {"type": "worker", "index": 0}}',
        '`TF_CONFIG` has `["a:1"]` as `cluster`, which is not an object of lists',
    ),
    "addresses as one text": (
        '{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}',
        '`TF_CONFIG` has `"a:1"` as `cluster.worker`, which is not a list of addresses',
    ),
    "an address that is a number": (
        '{"cluster": {"worker": [2222]}, "task": {"type": "worker", "index": 0}}',
        "`TF_CONFIG` has `2222` as `cluster.worker.0`, which is not a text",
    ),
    "an empty cluster": (tf_config({})["TF_CONFIG"], "`TF_CONFIG` has no address in `cluster`"),
    "empty roles": (tf_config({"worker": [], "ps": []})["TF_CONFIG"], "has no address in `cluster`"),
    "servers alone": (tf_config({"ps": [A]}, "ps")["TF_CONFIG"], "has only parameter servers in `cluster`"),
    "an unknown role": (tf_config({"wroker": [A]}, "wroker")["TF_CONFIG"], "names the role `wroker`"),
    "an unknown role of this task": (tf_config({"worker": [A]}, "boss")["TF_CONFIG"], "names the role `boss`"),
    "an evaluator below 0": (
        tf_config({"worker": [A]}, "evaluator", -1)["TF_CONFIG"],
        "this process is `evaluator -1`",
    ),
    "evaluators alone": (tf_config({"evaluator": [A]})["TF_CONFIG"], "`TF_CONFIG` has no address in `cluster`"),
    "a chief by two names": (
        tf_config({"chief": [A], "master": [B]}, "chief")["TF_CONFIG"],
        "names both `chief` and `master` in `cluster`",
    ),
    "two masters": (tf_config({"master": [A, B]}, "master")["TF_CONFIG"], "names 2 addresses for `chief`"),
    "indices with a gap": (
        tf_config({"worker": {"0": A, "2": B}})["TF_CONFIG"],
        "has the indices 0, 2 as `cluster.worker`, and some are missing",
    ),
    # As a TFJob with `enableDynamicWorker` writes it.
    "a sparse cluster of a worker": (
        '{"sparseCluster": {"worker": {"1": "b:1"}, "ps": ["p:1"]}, "task": {"type": "worker", "index": 1}}',
        "has a `sparseCluster` that does not name the other workers",
    ),
    "a sparse cluster of the first worker": (
        '{"sparseCluster": {"worker": {"0": "b:1"}, "ps": []}, "task": {"type": "worker", "index": 0}}',
        "has a `sparseCluster` that does not name the other workers",
    ),
    "a sparse cluster of a server": (
        '{"sparseCluster": {"worker": {}, "ps": ["p:1", "q:1"]}, "task": {"type": "ps", "index": 0}}',
        "has a `sparseCluster` that does not name the other workers",
    ),
    "two chiefs": (tf_config({"chief": [A, B]}, "chief")["TF_CONFIG"], "names 2 addresses for `chief`"),
    "a task that the cluster lacks": (
        tf_config({"worker": [A]}, "chief")["TF_CONFIG"],
        "says in `task` that this process is `chief 0`, and `cluster` has 0 of the role `chief`",
    ),
    "an index that the cluster lacks": (
        tf_config({"worker": [A, B]}, index=2)["TF_CONFIG"],
        "says in `task` that this process is `worker 2`, and `cluster` has 2 of the role `worker`",
    ),
    "an index below 0": (tf_config({"worker": [A]}, index=-1)["TF_CONFIG"], "this process is `worker -1`"),
    "an address twice in a role": (
        tf_config({"worker": ["a:2222", "a:2222"]})["TF_CONFIG"],
        "`TF_CONFIG` names `a:2222` for worker 0 and for worker 1",
    ),
    "an address twice in two roles": (
        tf_config({"worker": ["a:2222"], "ps": ["A:02222"]})["TF_CONFIG"],
        "`TF_CONFIG` names `A:02222` for worker 0 and for ps 0",
    ),
    "no port": (tf_config({"worker": ["a"]})["TF_CONFIG"], "names `a` for worker 0, which is not `host:port`"),
    "an empty port": (
        tf_config({"worker": ["a:"]})["TF_CONFIG"],
        "names `a:` for worker 0, which is not `host:port`",
    ),
    "no host": (tf_config({"worker": [":1"]})["TF_CONFIG"], "names `:1` for worker 0, which is not `host:port`"),
    "a port in words": (tf_config({"worker": ["a:http"]})["TF_CONFIG"], "names `a:http` for worker 0"),
    "a port in other digits": (tf_config({"worker": ["a:²"]})["TF_CONFIG"], "names `a:²` for worker 0"),
    "port 0": (
        tf_config({"worker": [A, "b:0"]})["TF_CONFIG"],
        "names `b:0` for worker 1, and ports go from 1 to 65",
    ),
    "a port too high": (tf_config({"worker": ["a:65536"]})["TF_CONFIG"], "names `a:65536` for worker 0, and ports"),
    "a URL": (tf_config({"worker": ["grpc://a:1"]})["TF_CONFIG"], "names `grpc://a:1` for worker 0, which is not"),
    "a space": (
        tf_config({"worker": [" a:1"]})["TF_CONFIG"],
        "names ` a:1` for worker 0, which is not `host:port`",
    ),
    "IPv6 without brackets": (tf_config({"worker": ["::1:2222"]})["TF_CONFIG"], "names `::1:2222` for worker 0"),
    "localhost among hosts": (
        tf_config({"worker": [A, "localhost:1"]})["TF_CONFIG"],
        f"names `localhost:1` for worker 1 beside `{A}` for worker 0, and `localhost` is another machine on every host",
    ),
    "a loopback address among hosts": (
        tf_config({"chief": ["127.0.1.1:1"], "worker": [A]})["TF_CONFIG"],
        f"names `127.0.1.1:1` for chief 0 beside `{A}` for worker 0",
    ),
    "no address at all among hosts": (tf_config({"worker": [A, "0.0.0.0:1"]})["TF_CONFIG"], "names `0.0.0.0:1`"),
}


class TestTfConfig:
    @pytest.mark.parametrize("cluster, role, index, expected", TF_CONFIG_DETECTED.values(), ids=TF_CONFIG_DETECTED)
    def test_ranks_count_chief_workers_and_servers(self, cluster, role, index, expected):
        world = World.detect(tf_config(cluster, role, index))
        assert places(world) == expected
        assert world.task == Task(role, index, cluster[role][index])
        assert world.source == "TF_CONFIG"

    @pytest.mark.parametrize("config, rank, names", TF_CONFIG_OF_PLATFORMS.values(), ids=TF_CONFIG_OF_PLATFORMS)
    def test_the_forms_of_the_platforms_are_read(self, config, rank, names):
        world = World.detect({"TF_CONFIG": json.dumps(config)})
        assert (world.rank, [world.named(other) for other in range(world.world_size)]) == (rank, names)
        assert World.detect({"TF_CONFIG": world.tf_config()}).tasks == world.tasks

    def test_tasks_are_in_the_order_of_ranks(self):
        world = World.detect(tf_config({"ps": [A], "worker": [B], "chief": [C]}, "chief"))
        assert world.tasks == (Task("chief", 0, C), Task("worker", 0, B), Task("ps", 0, A))
        assert world.is_chief
        assert world.tasks_of("ps") == (Task("ps", 0, A),)
        assert [world.named(rank) for rank in range(3)] == [f"chief 0 ({C})", f"worker 0 ({B})", f"ps 0 ({A})"]

    def test_worker_0_is_the_chief_where_no_task_is_called_so(self):
        assert [World.detect(tf_config({"worker": [A, B]}, index=i)).is_chief for i in (0, 1)] == [True, False]

    def test_an_address_has_a_host_and_a_port(self):
        task = Task("worker", 0, "[2001:db8::1]:2222")
        assert (task.host, task.port) == ("2001:db8::1", 2222)

    def test_it_goes_before_slurm(self):
        assert World.detect(slurm(1, 2) | tf_config({"worker": [A]})).world_size == 1

    def test_fields_that_do_not_say_who_is_who_are_let_through(self):
        assert World.detect(tf_config({"worker": [A, B]}, rpc_layer="grpc", environment="cloud")).world_size == 2

    @quick
    @given(
        some.lists(some.integers(1, 65535), min_size=2, max_size=9, unique=True),
        some.booleans(),
        some.integers(0, 3),
        some.data(),
    )
    def test_what_a_world_writes_for_tensorflow_is_read_back(self, ports, with_chief, servers, data):
        workers = len(ports) - with_chief - min(servers, len(ports) - with_chief - 1)
        counts = {"chief": int(with_chief), "worker": workers, "ps": len(ports) - with_chief - workers}
        names = [(role, index) for role in ROLES for index in range(counts[role])]
        tasks = tuple(Task(role, index, f"host{p % 3}:{p}") for (role, index), p in zip(names, ports, strict=True))
        world = World(data.draw(some.integers(0, len(ports) - 1)), len(ports), 0, 1, "TF_CONFIG", tasks)
        read = World.detect({"TF_CONFIG": world.tf_config()})
        assert (read.tasks, read.rank, read.tf_config()) == (tasks, world.rank, world.tf_config())

    def test_tensorflow_reads_the_same(self, monkeypatch):
        import tensorflow as tf

        world = World.detect(tf_config({"ps": [A], "worker": [B], "chief": [C]}, "worker"))
        monkeypatch.setenv("TF_CONFIG", world.tf_config())
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        assert resolver.cluster_spec().as_dict() == world.cluster()
        assert (resolver.task_type, resolver.task_id) == ("worker", 0)

    @pytest.mark.parametrize("text, says", TF_CONFIG_REFUSED.values(), ids=TF_CONFIG_REFUSED)
    def test_a_malformed_one_is_refused_by_its_field(self, text, says):
        with pytest.raises(UsageError) as caught:
            World.detect({"TF_CONFIG": text})
        assert says in caught.value.sentence
        assert caught.value.sentence.startswith("`TF_CONFIG` ")
        assert len(str(caught.value)) < 500
        assert caught.value.exit_code == EXIT_USAGE

    @quick
    @given(some.text() | some.recursive(some.none() | some.booleans() | some.integers() | some.text(), some.lists))
    def test_whatever_it_is_nothing_but_a_usage_error_is_raised(self, value):
        for text in (value if isinstance(value, str) else json.dumps(value), json.dumps({"cluster": value, "task": 0})):
            if text.strip():
                with pytest.raises(UsageError):
                    World.detect({"TF_CONFIG": text})


class TestEvaluator:
    """A process that evaluates checkpoints is none of the processes that train."""

    @pytest.mark.parametrize(
        "environment",
        [
            tf_config({"chief": [A], "worker": [B]}, "evaluator"),  # of a TFJob
            tf_config({"chief": [A], "worker": [B], "evaluator": [C]}, "evaluator"),
            tf_config({"evaluator": [C]}, "evaluator"),  # of TensorFlow's tutorial on parameter servers
            vertex({"workerpool0": [A], "workerpool1": [B], "workerpool3": [C]}, "workerpool3"),
        ],
        ids=["TFJob", "with its address", "alone in the cluster", "Vertex AI"],
    )
    def test_it_has_no_rank_and_is_no_chief(self, environment):
        world = World.detect(environment)
        assert (world.is_evaluator, world.evaluator, world.is_chief) == (True, 0, False)
        assert (world.world_size, world.tasks, world.tf_config()) == (1, (), "{}")

    def test_the_others_do_not_count_it(self):
        cluster = {"chief": [A], "worker": [B], "evaluator": [C]}
        assert World.detect(tf_config(cluster)) == World.detect(tf_config({"chief": [A], "worker": [B]}))

    def test_a_strategy_that_trains_in_the_job_is_refused_there(self):
        world = World.detect(tf_config({"worker": [A]}, "evaluator", 1))
        with pytest.raises(UsageError, match=r"TF_CONFIG makes this process evaluator 1(?s:.*)evaluate_checkpoints"):
            world.require_training("multiworker")
        World.detect(tf_config({"worker": [A]})).require_training("multiworker")


POOLS = {"workerpool0": ["p0-0:2222"], "workerpool1": ["p1-0:2222", "p1-1:2222"], "workerpool2": ["p2-0:2222"]}


class TestVertexAI:
    """CLUSTER_SPEC: cloud.google.com/vertex-ai/docs/training/distributed-training."""

    @pytest.mark.parametrize(
        ("pool", "index", "rank", "name"),
        [
            ("workerpool0", 0, 0, "chief 0 (p0-0:2222)"),
            ("workerpool1", 1, 2, "worker 1 (p1-1:2222)"),
            ("workerpool2", 0, 3, "ps 0 (p2-0:2222)"),
        ],
    )
    def test_the_position_of_a_pool_is_a_role(self, pool, index, rank, name):
        world = World.detect(vertex(POOLS, pool, index))
        assert (world.rank, world.world_size, str(world.task)) == (rank, 4, name)
        assert world.source == "Vertex AI (CLUSTER_SPEC)"

    def test_one_replica_trains_alone(self):
        assert World.detect(vertex({"workerpool0": ["p0-0:2222"]}, "workerpool0")).world_size == 1

    def test_its_tf_config_goes_first(self):
        assert World.detect(vertex(POOLS, "workerpool1") | tf_config({"worker": [A]})).source == "TF_CONFIG"

    def test_a_variable_of_that_name_that_is_not_of_vertex_says_nothing(self):
        assert World.detect({"CLUSTER_SPEC": "small"}) == World()

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("workerpool0", "`CLUSTER_SPEC` is `workerpool0`, which is not JSON"),
            (vertex(POOLS, "workerpool3", -1)["CLUSTER_SPEC"], "`CLUSTER_SPEC` says in `task`"),
            (vertex({"workerpool9": [A]}, "workerpool0")["CLUSTER_SPEC"], "names the role `workerpool9`"),
        ],
    )
    def test_one_that_cannot_be_is_refused_by_its_name(self, value, says):
        with pytest.raises(UsageError) as caught:
            World.detect({"CLUSTER_SPEC": value})
        assert says in caught.value.sentence


class TestSageMaker:
    """SM_HOSTS and SM_CURRENT_HOST: ENVIRONMENT_VARIABLES.md of aws/sagemaker-training-toolkit."""

    @pytest.mark.parametrize(("current", "rank"), [("algo-1", 0), ("algo-2", 1)])
    def test_there_is_a_worker_on_each_host(self, current, rank):
        world = World.detect(sagemaker('["algo-1", "algo-2"]', current) | {"SM_NUM_GPUS": "8"})
        assert places(world) == (rank, 2, 0, 1)
        assert [str(task) for task in world.tasks] == ["worker 0 (algo-1:2222)", "worker 1 (algo-2:2222)"]
        assert world.source == "SageMaker (SM_HOSTS, SM_CURRENT_HOST)"

    def test_one_host_trains_alone(self):
        assert World.detect(sagemaker('["algo-1"]', "algo-1")).world_size == 1

    @pytest.mark.parametrize(
        "more", [tf_config({"worker": [A]}), {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}]
    )
    def test_what_is_started_within_it_goes_first(self, more):
        assert not World.detect(sagemaker('["a", "b"]', "a") | more).source.startswith("SageMaker")

    @pytest.mark.parametrize(
        ("hosts", "current", "says"),
        [
            ("algo-1", "algo-1", "`SM_HOSTS` is `algo-1`, which is not a JSON list of host names"),
            ("[]", "algo-1", "`SM_HOSTS` is `[]`, which is not a JSON list"),
            ('["a", 1]', "a", "which is not a JSON list"),
            ('["a", "a"]', "a", "which names `a` twice"),
            ('["a", "b"]', "c", "`SM_CURRENT_HOST` is `c`, which is not in `SM_HOSTS`"),
            ('["a", "b"]', "", "`SM_CURRENT_HOST` is ``, which is not in `SM_HOSTS`"),
        ],
    )
    def test_variables_that_cannot_be_are_refused_by_name(self, hosts, current, says):
        with pytest.raises(UsageError) as caught:
            World.detect(sagemaker(hosts, current))
        assert says in caught.value.sentence and caught.value.hint


# Rank, size, variables, and then local rank, local world size and the hosts by rank.
SLURM_DETECTED = {
    "one task a node": (1, 2, {}, (0, 1), ["n1", "n2"]),
    "two tasks on one node": (1, 2, {"SLURM_JOB_NODELIST": "n1"}, (1, 2), ["n1", "n1"]),
    "equal parts where nothing is said": (3, 4, {}, (1, 2), ["n1", "n1", "n2", "n2"]),
    "as many as are said": (2, 3, {"SLURM_TASKS_PER_NODE": "2,1"}, (0, 1), ["n1", "n1", "n2"]),
    "said once for several nodes": (
        6,
        7,
        {"SLURM_JOB_NODELIST": "n[1-3],login", "SLURM_TASKS_PER_NODE": "2(x3),1"},
        (0, 1),
        ["n1", "n1", "n2", "n2", "n3", "n3", "login"],
    ),
    "a step on one node of two": (
        1,
        8,
        {
            "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_STEP_NODELIST": "n2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_TASKS_PER_NODE": "4(x2)",
        },
        (1, 2),
        ["n2", "n2"],
    ),
    "the local rank that Slurm says": (
        1,
        2,
        {"SLURM_JOB_NODELIST": "n1", "SLURM_LOCALID": 1},
        (1, 2),
        ["n1", "n1"],
    ),
}

SLURM_REFUSED = {
    "a rank in words": ({"SLURM_PROCID": "first"}, "`SLURM_PROCID` is `first`, which is not a number"),
    "a size in words": ({"SLURM_NTASKS": "two"}, "`SLURM_NTASKS` is `two`, which is not a number"),
    "a job in words": ({"SLURM_JOB_ID": "x"}, "`SLURM_JOB_ID` is `x`, which is not a number"),
    "no size": ({"SLURM_NTASKS": ""}, "neither `SLURM_STEP_NUM_TASKS` nor `SLURM_NTASKS` is set"),
    "no nodes": ({"SLURM_JOB_NODELIST": ""}, "neither `SLURM_STEP_NODELIST` nor `SLURM_JOB_NODELIST` is set"),
    "a rank beyond": ({"SLURM_PROCID": "2"}, "`SLURM_PROCID` is 2 of `SLURM_NTASKS` 2"),
    "more tasks than nodes have": (
        {"SLURM_TASKS_PER_NODE": "2(x2)"},
        "`SLURM_NTASKS` 2, and `SLURM_JOB_NODELIST` has 2 nodes with 4 tasks in `SLURM_TASKS_PER_NODE`",
    ),
    "tasks of other nodes": ({"SLURM_TASKS_PER_NODE": "2"}, "has 2 nodes with 2 tasks in `SLURM_TASKS_PER_NODE`"),
    "unequal parts that nothing says": ({"SLURM_NTASKS": "3"}, "has 2 nodes with 2 tasks in equal parts"),
    "tasks in words": ({"SLURM_TASKS_PER_NODE": "2x"}, "`SLURM_TASKS_PER_NODE` is `2x`, and not of the form"),
    "an open bracket": ({"SLURM_JOB_NODELIST": "n[1-2"}, "`SLURM_JOB_NODELIST` is `n[1-2`, whose brackets"),
    "a closing bracket": ({"SLURM_JOB_NODELIST": "n1]"}, "`n1]`, whose brackets do not match"),
    "an empty bracket": ({"SLURM_JOB_NODELIST": "n[]"}, "`n[]`, whose `` is neither a number nor a range"),
    "a range downwards": ({"SLURM_JOB_NODELIST": "n[2-1]"}, "`n[2-1]`, whose range `2-1` goes down"),
    "an endless range": ({"SLURM_JOB_NODELIST": "n[0-9999999999]"}, "or names more than 100000 hosts"),
    "an endless product": (
        {"SLURM_JOB_NODELIST": "n[0-999][0-999]"},
        "`n[0-999][0-999]`, which names more than 100000 hosts",
    ),
    "an empty name": ({"SLURM_JOB_NODELIST": "n1,,n2"}, "`n1,,n2`, which has an empty name"),
    "ranks dealt in turn": (
        {"SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_LOCALID": "0"},
        "`SLURM_LOCALID` is 0, and rank 1 would be number 1 on its node",
    ),
    "servers in words": ({"TFDIST_PS": "one"}, "`TFDIST_PS` is `one`, which is not a number"),
    "too many servers": ({"TFDIST_PS": "1"}, "`TFDIST_PS` is 1 in a step of 2 tasks"),
}


class TestSlurm:
    @pytest.mark.parametrize("rank, size, more, local, hosts", SLURM_DETECTED.values(), ids=SLURM_DETECTED)
    def test_ranks_follow_each_other_node_by_node(self, rank, size, more, local, hosts):
        world = World.detect(slurm(rank, size, **more))
        assert places(world) == (rank, len(hosts), *local)
        assert [task.host for task in world.tasks] == hosts
        assert {task.role for task in world.tasks} == {"worker"}

    def test_ports_follow_from_the_job_and_the_place_on_the_node(self):
        world = World.detect(slurm(0, 4))
        assert [task.address for task in world.tasks] == ["n1:20112", "n1:20113", "n2:20112", "n2:20113"]

    @quick
    @given(some.integers(0, 10**9), some.integers(2, 16))
    def test_ports_can_be_listened_on_and_neighbouring_jobs_do_not_share_any(self, job, size):
        ports = [
            {task.port for task in World.detect(slurm(0, size, "n1", SLURM_JOB_ID=number)).tasks}
            for number in (job, job + 1)
        ]
        assert len(ports[0] | ports[1]) == 2 * size
        assert min(ports[0]) >= 20_000 and max(ports[0]) < 30_016

    def test_the_source_names_the_variables(self):
        variables = "SLURM_PROCID, SLURM_NTASKS, SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE, SLURM_JOB_ID, TFDIST_PS"
        assert World.detect(slurm(0, 3, "n1", SLURM_TASKS_PER_NODE=3, TFDIST_PS=1)).source == f"Slurm ({variables})"

    def test_parameter_servers_are_the_last_tasks_and_the_chief_the_first(self):
        world = World.detect(slurm(4, 5, "n1", TFDIST_PS=2))
        assert [(task.role, task.index) for task in world.tasks] == [
            ("chief", 0),
            ("worker", 0),
            ("worker", 1),
            ("ps", 0),
            ("ps", 1),
        ]
        assert world.task == world.tasks_of("ps")[1]

    @pytest.mark.parametrize("servers", ["", "0"])
    def test_without_parameter_servers_all_are_workers(self, servers):
        assert len(World.detect(slurm(0, 2, TFDIST_PS=servers)).tasks_of("worker")) == 2

    @pytest.mark.parametrize("variables, says", SLURM_REFUSED.values(), ids=SLURM_REFUSED)
    def test_variables_that_cannot_be_are_refused_by_name(self, variables, says):
        with pytest.raises(UsageError) as caught:
            World.detect(slurm(0, 2) | variables)
        assert says in caught.value.sentence


EXPANDED = {
    "n1": ["n1"],
    "gpu[01-03,07],login1": ["gpu01", "gpu02", "gpu03", "gpu07", "login1"],
    "r[1-2]n[08-10]": ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"],
    "a[1,3].b[2].net,c-d": ["a1.b2.net", "a3.b2.net", "c-d"],
    "n[1,2[0-1],5]": ["n1", "n20", "n21", "n5"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
}


NUMBERS = some.lists(
    some.tuples(some.integers(0, 300), some.integers(0, 12), some.integers(1, 5)), min_size=1, max_size=4
)
NAMES = some.text("abcxyz-.", min_size=1, max_size=5)


class TestExpandHosts:
    @pytest.mark.parametrize("text", EXPANDED)
    def test_brackets_stand_for_numbers_and_ranges(self, text):
        assert expand_hosts(text) == EXPANDED[text]

    @quick
    @given(some.lists(some.tuples(NAMES, some.lists(some.tuples(NUMBERS, NAMES), max_size=2)), min_size=1, max_size=4))
    def test_a_list_that_is_folded_unfolds_to_its_hosts_in_their_order(self, items):
        texts, hosts = [], []
        for head, brackets in items:
            text, names = head, [head]
            for ranges, tail in brackets:
                text += "[" + ",".join(f"{a:0{w}d}-{a + n:0{w}d}" if n else f"{a:0{w}d}" for a, n, w in ranges) + "]"
                numbers = [f"{number:0{len(f'{a:0{w}d}')}d}" for a, n, w in ranges for number in range(a, a + n + 1)]
                names = [name + number + tail for name in names for number in numbers]
                text += tail
            texts.append(text)
            hosts += names
        assert expand_hosts(",".join(texts)) == hosts

    @quick
    @given(some.text("a1,[]-", max_size=12))
    def test_whatever_it_is_nothing_but_a_usage_error_is_raised(self, text):
        try:
            assert all(expand_hosts(text))
        except UsageError as error:
            assert "the list of hosts is" in error.sentence or "`the list of hosts` is" in error.sentence


class TestCommand:
    def test_it_prints_what_was_detected_and_from_where(self):
        job = tf_config({"worker": [A, B], "ps": ["[2001:db8::1]:5"]}, index=1)
        done = CliRunner(env=job).invoke(world.command, [])
        assert done.exit_code == 0
        rows = [line.rstrip() for line in done.output.splitlines()]
        assert rows == [
            "source      TF_CONFIG",
            "rank        1 of 3",
            "local rank  0 of 1",
            f"rank 0      worker 0 ({A})",
            f"rank 1      worker 1 ({B}), this process",
            "rank 2      ps 0 ([2001:db8::1]:5)",
        ]

    def test_an_evaluator_is_told_apart(self):
        done = CliRunner(env=tf_config({"worker": [A]}, "evaluator", 1)).invoke(world.command, [])
        assert [line.rstrip() for line in done.output.splitlines()] == [
            "source     TF_CONFIG",
            "evaluator  1, which takes no part in the training",
        ]

    def test_a_malformed_one_ends_with_exit_code_2_and_without_tensorflow(self):
        code = (
            "import atexit, sys, tfdist.world; atexit.register(lambda: print('tensorflow' in sys.modules)); "
            "tfdist.world.main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"TF_CONFIG": "{"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.stdout, done.returncode) == ("False\n", 2)
        assert done.stderr.startswith("error: `TF_CONFIG` is `{`, which is not JSON")
        assert "hint: " in done.stderr


def open_mpi(rank, size, local_rank=None, local_size=None):
    found = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
    if local_rank is not None:
        found |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size)}
    return found


HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}


class TestPlacesWithoutAddresses:
    @pytest.mark.parametrize(
        ("environment", "expected", "source"),
        [
            (open_mpi(1, 4, 1, 2), (1, 4, 1, 2), "mpirun of Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"),
            (open_mpi(1, 2), (1, 2, 1, 2), "mpirun of Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"),
            (open_mpi(0, 1), (0, 1, 0, 1), "mpirun of Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)"),
            (HOROVODRUN, (3, 4, 1, 2), "horovodrun (HOROVOD_RANK, HOROVOD_SIZE)"),
            (HOROVODRUN | open_mpi(0, 9), (3, 4, 1, 2), "horovodrun (HOROVOD_RANK, HOROVOD_SIZE)"),
            ({"PMI_RANK": "1", "PMI_SIZE": "3"}, (1, 3, 1, 3), "PMI (PMI_RANK, PMI_SIZE)"),
            ({"PMIX_RANK": "1", "PMIX_SIZE": "3"}, (1, 3, 1, 3), "PMIx (PMIX_RANK, PMIX_SIZE)"),
            # `srun` starts the daemons of an `mpirun` inside an allocation, and their variables are inherited.
            (slurm(0, 2) | open_mpi(3, 4, 1, 2), (3, 4, 1, 2), "mpirun of Open MPI"),
        ],
    )
    def test_the_places_of_mpirun_and_horovodrun_are_found(self, environment, expected, source):
        world = World.detect(environment)
        assert places(world) == expected
        assert world.source.startswith(source)
        assert world.tasks == () and world.named(1) == "rank 1"

    def test_slurm_knows_more_than_pmi(self):
        assert World.detect(slurm(1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2"}).source.startswith("Slurm")

    @pytest.mark.parametrize(
        ("environment", "what"),
        [
            ({"OMPI_COMM_WORLD_RANK": "0"}, "`OMPI_COMM_WORLD_SIZE` is not set"),
            (open_mpi(2, 2), "`OMPI_COMM_WORLD_RANK` is 2 of `OMPI_COMM_WORLD_SIZE` 2"),
            (open_mpi("one", 2), "`OMPI_COMM_WORLD_RANK` is `one`, which is not a number"),
            (open_mpi(0, 2, 1, 1), "this process is number 1 of the 1 on its machine"),
        ],
    )
    def test_places_that_cannot_be_are_refused(self, environment, what):
        with pytest.raises(UsageError) as found:
            World.detect(environment)
        assert what in found.value.sentence and found.value.hint


def test_horovod_counts_the_hosts_that_have_a_process_of_the_same_place():
    """Of two hosts, one has two processes and the other one."""
    addresses = ["192.0.2.1:2221", "192.0.2.1:2222", "192.0.2.2:2221"]
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    found = []
    for rank in range(3):
        variables = horovod.gloo_variables(World.detect(tf_config({"worker": addresses}, index=rank)))
        found.append([int(variables[f"HOROVOD_{name}"]) for name in names])
    assert found == [[0, 2, 0, 2], [1, 2, 0, 1], [0, 1, 1, 2]]
