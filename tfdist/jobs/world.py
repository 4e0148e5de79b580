"""Who am I among whom: read once, frozen, with its source.

Pure parsing: this module never imports TensorFlow. A process that was started alone is a world of one.

Synopsis:

    >>> World.detect({})
    World(rank=0, world_size=1, local_rank=0, local_world_size=1, source='alone', tasks=())
    >>> slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[01-02]"}
    >>> world = World.detect(slurm)
    >>> world.named(1)
    'worker 1 (gpu02:20112)'
    >>> world.tf_config()
    '{"cluster": {"worker": ["gpu01:20112", "gpu02:20112"]}, "task": {"type": "worker", "index": 1}}'
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.errors import UsageError
from tfdist.jobs import cluster_file, slurm, tf_config
from tfdist.jobs.job_environment import number
from tfdist.jobs.task import ROLES, Task, means_itself

# Environment variables that set no addresses: rank, world size, local rank, local world size.
VARIABLES_OF_RANKS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "mpirun of Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
}
# Those of the process managers PMI and PMIx, such as MPICH's `mpirun`; under Slurm its own variables say more.
PMI = {
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PMIx": ("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
}

# Messages name as many ranks one by one, and if all must be told apart, as few.
MOST_NAMES = 8
FEW = 3


@dataclass(frozen=True)
class World:
    """The place of this process in its job.

    Attributes:
        rank: this process' number, 0 to `world_size - 1`.
        world_size: the number of processes in the job.
        local_rank: this process' number on its machine.
        local_world_size: the number of those processes on this machine.
        source: the variables that say so, or "alone".
        tasks: all processes of the job by rank: chief, workers, parameter servers; empty when alone, and where the
            source knows no addresses, as MPI.
        speeds: how large the part of each process of a batch is, in proportion to the others; `None` if they are equal.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "alone"
    tasks: tuple[Task, ...] = ()
    speeds: tuple[int, ...] | None = field(default=None, repr=False)

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> World:
        """The world that `environment` describes, or one process.

        By TF_CONFIG, or the file that replaces it in large jobs, else the variables of `horovodrun`, of Open MPI's
        `mpirun`, of Slurm, of PMI or PMIx.

        Raises:
            UsageError: the description cannot be; the message says which field or variable.
        """
        config = cluster_file.find(environment)
        if config:
            return _of_tasks(*tf_config.parse(config), cluster_file.TF_CONFIG)
        for source, names in VARIABLES_OF_RANKS.items():
            if names[0] in environment:
                return _from_places(source, names, environment)
        if slurm.RANK in environment:
            return _of_tasks(*slurm.parse(environment))
        for source, names in PMI.items():
            if names[0] in environment and names[1] in environment:
                return _from_places(source, names, environment)
        return cls()

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files of the run: the chief, or worker 0 where no task is called so."""
        return self.rank == 0

    @property
    def task(self) -> Task | None:
        """This process' own task; `None` when alone."""
        return self.tasks[self.rank] if self.tasks else None

    def tasks_of(self, role: str) -> tuple[Task, ...]:
        """The tasks of a role, by their numbers."""
        return tuple(task for task in self.tasks if task.role == role)

    def cluster(self) -> dict[str, list[str]]:
        """The addresses by role, as TF_CONFIG and `tf.train.ClusterSpec` have them."""
        return {role: [t.address for t in self.tasks_of(role)] for role in ROLES if self.tasks_of(role)}

    def tf_config(self) -> str:
        """This world as the TF_CONFIG of this process, which TensorFlow's resolver reads; `{}` when alone."""
        task = self.task
        if task is None:
            return "{}"
        return json.dumps({"cluster": self.cluster(), "task": {"type": task.role, "index": task.index}})

    def require_size(self, found: int, engine: str) -> None:
        """Refuses a job that an engine sees otherwise than whoever started it: each process would train alone.

        Raises:
            UsageError: `engine` finds another number of processes.
        """
        if found != self.world_size:
            raise UsageError(
                f"{self.source} says that there are {self.world_size} processes, and {engine} finds {found}",
                "start them with `python -m tfdist.launch --mpi`, or with the `mpirun` of the MPI library that this "
                "program is linked with",
            )

    def require_addresses(self, strategy: str) -> None:
        """Raises `UsageError` for a job whose processes do not know each other's addresses, which `strategy` needs."""
        if self.world_size > 1 and not self.tasks:
            raise UsageError(
                f"{self.source} names no addresses, and `{strategy}` needs them",
                "start the job with `python -m tfdist.launch`, with Slurm's `srun`, or with `TF_CONFIG` set",
            )

    def named(self, rank: int) -> str:
        """How messages name a rank, such as `worker 1 (10.0.0.2:2222)`."""
        return str(self.tasks[rank]) if rank < len(self.tasks) else f"rank {rank}"

    def named_all(self, ranks: Collection[int]) -> str:
        """How messages name several ranks with their addresses: the first few of them, and how many more there are."""
        names = [self.named(rank) for rank in sorted(ranks)[:MOST_NAMES]]
        return _listed(names if len(ranks) <= MOST_NAMES else [*names, f"{len(ranks) - MOST_NAMES} more"])

    def named_briefly(self, ranks: Collection[int]) -> str:
        """How messages name all of several ranks, such as `ranks 0, 3 to 511 and 600`; a few with their addresses."""
        if len(ranks) <= FEW:
            return self.named_all(ranks)
        runs: list[list[int]] = []
        for rank in sorted(ranks):
            if runs and runs[-1][-1] == rank - 1:
                runs[-1][1:] = [rank]
            else:
                runs.append([rank])
        shown = [" to ".join(map(str, run)) for run in runs[:MOST_NAMES]]
        rest = sum(run[-1] - run[0] + 1 for run in runs[MOST_NAMES:])
        return "ranks " + _listed(shown if not rest else [*shown, f"{rest} more"])


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _from_places(source: str, names: Sequence[str], environment: Mapping[str, str]) -> World:
    rank_name, size_name, *local_names = names
    if size_name not in environment:
        raise UsageError(
            f"`{rank_name}` is `{environment[rank_name]}`, and `{size_name}` is not set",
            f"start the processes with {source.partition(' ')[0]}, or unset `{rank_name}` to train alone",
        )
    rank, size = number(environment, rank_name), number(environment, size_name)
    # Without the local ones, all processes are taken to be on this machine.
    known = all(name in environment for name in local_names)
    local_rank, local_size = (number(environment, name) for name in local_names) if known else (rank, size)
    if not (rank < size and local_rank < local_size <= size):
        raise UsageError(
            f"`{rank_name}` is {rank} of `{size_name}` {size}, and this process is number {local_rank} of the "
            f"{local_size} on its machine",
            f"start the processes with {source.partition(' ')[0]}, or unset `{rank_name}` to train alone",
        )
    if size == 1:
        return World(source=f"{source} ({rank_name}, {size_name})")
    return World(rank, size, local_rank, local_size, f"{source} ({rank_name}, {size_name})")


def _of_tasks(rank: int, tasks: tuple[Task, ...], source: str) -> World:
    if not tasks:
        return World(source=source)
    # All names that a machine has for itself are the same machine.
    machines = ["localhost" if means_itself(task.host) else task.host.lower() for task in tasks]
    here = machines[rank]
    return World(rank, len(tasks), machines[:rank].count(here), Counter(machines)[here], source, tasks)
