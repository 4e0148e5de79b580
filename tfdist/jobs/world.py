"""The rank of this process and the other processes of its job: read once from the environment, then frozen.

This module only parses, and never imports TensorFlow. A process that was started alone is a world of one process.

Synopsis:

    >>> World.detect({})
    World(rank=0, world_size=1, local_rank=0, local_world_size=1, source='alone', tasks=())
    >>> slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    >>> world = World.detect(slurm)
    >>> world.named(1)
    'worker 1 (gpu02:20112)'
    >>> World.detect({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}).named(1)
    'worker 1 (algo-2:2222)'
    >>> world.tf_config()
    '{"cluster": {"worker": ["gpu01:20112", "gpu02:20112"]}, "task": {"type": "worker", "index": 1}}'
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.errors import UsageError, enumerated
from tfdist.jobs import sagemaker, slurm, tf_config
from tfdist.jobs.job_environment import TF_CONFIG, find_tf_config, number
from tfdist.jobs.tf_config import CLUSTER_SPEC, EVALUATOR, ROLES, Task, means_itself

# Environment variables that contain no addresses: rank, world size, local rank, local world size.
VARIABLES_OF_RANKS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun of Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
# Those of the process managers PMI and PMIx, such as MPICH's `mpirun`. Slurm's own variables contain more, and are read
# first.
PMI = {
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PMIx": ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
}

# How many ranks a message names one by one, and how many if it must name all of them.
MOST_NAMES = 8
FEW = 3


ALONE = "alone"  # the source of a world that no environment variable describes


@dataclass(frozen=True)
class World:
    """The job, and the rank of this process in it.

    Attributes:
        rank: the rank of this process, 0 to `world_size - 1`.
        world_size: the number of processes in the job.
        local_rank: the number of this process among the processes of the job on its machine.
        local_world_size: the number of processes of the job on this machine.
        source: the environment variables that these values come from, or "alone".
        tasks: all processes of the job by rank: chief, workers, parameter servers. Empty for a process that was started
            alone, for an evaluator, and if the source contains no addresses, as with MPI.
        evaluator: the number of this process among the evaluators, which evaluate the checkpoints of a job and take no
            part in its training; `None` for a process that trains.
        speeds: the relative size of each process's part of a batch; `None` if all parts are equal.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = ALONE
    tasks: tuple[Task, ...] = ()
    evaluator: int | None = field(default=None, repr=False)
    speeds: tuple[int, ...] | None = field(default=None, repr=False)

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> World:
        """The world that `environment` describes; one process if it describes none.

        Reads TF_CONFIG, or the file that replaces it in large jobs, else the variables of `horovodrun`, of Open MPI's
        `mpirun`, of Slurm, of PMI or PMIx, of Vertex AI, of SageMaker.

        Raises:
            UsageError: the description is wrong; the message names the field or variable.
        """
        config = find_tf_config(environment)
        if config:
            return _from_config(config, TF_CONFIG, TF_CONFIG)
        for source, names in VARIABLES_OF_RANKS.items():
            if names[0] in environment:
                return _from_ranks(source, names, environment)
        if slurm.RANK in environment:
            return _from_tasks(*slurm.parse(environment))
        for source, names in PMI.items():
            if names[0] in environment and names[1] in environment:
                return _from_ranks(source, names, environment)
        return _from_platform(environment)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run: rank 0, which is worker 0 if no task has the role chief."""
        return self.rank == 0 and not self.is_evaluator

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates the checkpoints of a job, and takes no part in its training."""
        return self.evaluator is not None

    @property
    def place(self) -> str:
        """What this process is, such as `evaluator 0` or `rank 1 of 2`."""
        return f"{EVALUATOR} {self.evaluator}" if self.is_evaluator else f"rank {self.rank} of {self.world_size}"

    @property
    def task(self) -> Task | None:
        """The task of this process; `None` if there are no tasks."""
        return self.tasks[self.rank] if self.tasks else None

    def tasks_of(self, role: str) -> tuple[Task, ...]:
        """The tasks of a role, by index."""
        return tuple(task for task in self.tasks if task.role == role)

    def cluster(self) -> dict[str, list[str]]:
        """The addresses by role, as in TF_CONFIG and `tf.train.ClusterSpec`."""
        return {role: [t.address for t in self.tasks_of(role)] for role in ROLES if self.tasks_of(role)}

    def tf_config(self) -> str:
        """The TF_CONFIG of this process, which TensorFlow's resolver reads; `{}` if there are no tasks."""
        task = self.task
        if task is None:
            return "{}"
        return json.dumps({"cluster": self.cluster(), "task": {"type": task.role, "index": task.index}})

    def require_training(self, strategy: str) -> None:
        """Raises `UsageError` if this process is an evaluator: `strategy` would train a separate model in it."""
        if self.is_evaluator:
            raise UsageError(
                f"{self.source} makes this process {self.place}, which takes no part in the training, "
                f"and `{strategy}` trains in the processes of the job",
                "call `tfdist.evaluate_checkpoints` here, or start `python -m tfdist.train`, which does; see "
                "docs/kubeflow.md",
            )

    def require_size(self, engine_size: int, engine: str) -> None:
        """Requires that `engine` finds all processes of the job: otherwise each process would train alone.

        Raises:
            UsageError: `engine` finds another number of processes.
        """
        if engine_size != self.world_size:
            raise UsageError(
                f"{self.source} says that there are {self.world_size} processes, and {engine} finds {engine_size}",
                "start them with `python -m tfdist.launch --mpi`, or with the `mpirun` of the MPI library that this "
                "program is linked with",
            )

    def require_addresses(self, strategy: str) -> None:
        """Raises `UsageError` if `strategy` needs the addresses of the processes, and they are unknown."""
        if self.world_size > 1 and not self.tasks:
            raise UsageError(
                f"{self.source} names no addresses, and `{strategy}` needs them",
                "start the job with `python -m tfdist.launch`, with Slurm's `srun`, or with `TF_CONFIG` set",
            )

    def named(self, rank: int) -> str:
        """The name of a rank in messages, such as `worker 1 (10.0.0.2:2222)`."""
        return str(self.tasks[rank]) if rank < len(self.tasks) else f"rank {rank}"

    def named_all(self, ranks: Collection[int], conjunction: str = "and") -> str:
        """The names of several ranks in messages: the first few, with addresses, and how many more there are."""
        names = [self.named(rank) for rank in sorted(ranks)[:MOST_NAMES]]
        more = [f"{len(ranks) - MOST_NAMES} more"] if len(ranks) > MOST_NAMES else []
        return enumerated([*names, *more], conjunction)

    def named_briefly(self, ranks: Collection[int]) -> str:
        """The numbers of several ranks, such as `ranks 0, 3 to 511 and 600`; the names, if there are only a few."""
        if len(ranks) <= FEW:
            return self.named_all(ranks)
        runs: list[list[int]] = []
        for rank in sorted(ranks):
            if runs and runs[-1][-1] == rank - 1:
                runs[-1][1:] = [rank]
            else:
                runs.append([rank])
        shown = [" to ".join(map(str, run)) for run in runs[:MOST_NAMES]]
        omitted = sum(run[-1] - run[0] + 1 for run in runs[MOST_NAMES:])
        return "ranks " + enumerated([*shown, f"{omitted} more"] if omitted else shown)


def _from_ranks(source: str, names: Sequence[str], environment: Mapping[str, str]) -> World:
    """The world that four environment variables describe, see `VARIABLES_OF_RANKS`."""
    rank_name, size_name, *local_names = names
    hint = f"start the processes with {source.partition(' ')[0]}, or unset `{rank_name}` to train alone"
    if size_name not in environment:
        raise UsageError(f"`{rank_name}` is `{environment[rank_name]}`, and `{size_name}` is not set", hint)
    rank, size = number(environment, rank_name), number(environment, size_name)
    # Without the local variables, all processes are assumed to be on this machine.
    are_set = all(name in environment for name in local_names)
    local_rank, local_size = (number(environment, name) for name in local_names) if are_set else (rank, size)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(
            f"`{rank_name}` is {rank} of `{size_name}` {size}, and this process is number {local_rank} of the "
            f"{local_size} on its machine",
            hint,
        )
    if size == 1:
        return World(source=f"{source} ({rank_name}, {size_name})")
    return World(rank, size, local_rank, local_size, f"{source} ({rank_name}, {size_name})")


def _from_config(config: str, variable: str, source: str) -> World:
    place, tasks = tf_config.parse(config, variable)
    if place.evaluator is not None:
        return World(source=source, evaluator=place.evaluator)
    return _from_tasks(place.rank, tasks, source)


def _from_platform(environment: Mapping[str, str]) -> World:
    """The world that a cloud platform describes, in which other launchers may have started the process."""
    if "workerpool" in environment.get(CLUSTER_SPEC, ""):  # other programs may use a variable with this name
        return _from_config(environment[CLUSTER_SPEC], CLUSTER_SPEC, f"Vertex AI ({CLUSTER_SPEC})")
    if sagemaker.HOSTS in environment:
        return _from_tasks(*sagemaker.parse(environment))
    return World()


def _from_tasks(rank: int, tasks: tuple[Task, ...], source: str) -> World:
    if not tasks:
        return World(source=source)
    # All names by which a machine calls itself are the same machine.
    machines = ["localhost" if means_itself(task.host) else task.host.lower() for task in tasks]
    here = machines[rank]
    return World(rank, len(tasks), machines[:rank].count(here), Counter(machines)[here], source, tasks)
