"""The rows of the matrix, as plain data: which process of which job meets which fault, when, and what has to follow."""

from dataclasses import dataclass, field

SECONDS_OF_GRACE = 15
TIMEOUT_SECONDS = 6
START_SECONDS = 12
SECONDS_TO_REASSIGN = 30  # that TensorFlow takes to give the steps of a silent worker to another
ENDLESS = 100_000  # epochs
KILLED, TERMINATED = -9, -15

MOMENTS = ("start", "meeting", "training", "validation", "checkpoint", "end")
NETWORK_FAULTS = ("cut", "one-way", "loss", "delay", "unresolvable")
FAULTS = (
    "SIGKILL",
    "SIGTERM",
    "SIGSTOP",
    *NETWORK_FAULTS,
    "exception",
    "exit",
    "memory",
    "full disk",
    "strangers",
    "clock",
)


@dataclass(frozen=True)
class Row:
    """One fault in one job.

    Attributes:
        engine: the strategy.
        role: the process that meets the fault, such as `worker 1`, or `launcher`.
        fault: one of `FAULTS`.
        moment: one of `MOMENTS`. `start` is before the process has met any other, `meeting` is while they connect.
        named: what the errors of the others have to say; empty if there is nothing to say.
        says: what the errors have to say besides.
        exits: the exit codes that the other processes may have, or the launcher. One that ends with 0 says nothing.
        chief_exits: those of the chief of a parameter server, if they differ.
        faulty_exits: those of the process that met the fault, if it is started by hand; `None`: it is still there.
        launched: whether the launcher starts the job; otherwise each process is started with its TF_CONFIG.
        roles: the processes of a job that is started by hand.
        arguments: of the launcher.
        options: of the strategy.
        epochs: how long the job trains if it can.
        stops: whether the training ends with the epoch after the fault.
        timeout_seconds: after which a silent process is lost.
        work_seconds: what a job that goes on may take for its training after the fault.
    """

    engine: str
    role: str
    fault: str
    moment: str
    named: str = ""
    says: str = ""
    exits: tuple = (3,)
    chief_exits: tuple = ()
    faulty_exits: tuple = (3,)
    launched: bool = False
    roles: tuple = ("worker", "worker")
    arguments: tuple = ()
    options: dict = field(default_factory=dict)
    epochs: int = ENDLESS
    stops: bool = False
    timeout_seconds: int = TIMEOUT_SECONDS
    work_seconds: int = 0

    @property
    def name(self):
        start = " ".join(("launched", *self.arguments)) if self.launched else "by hand"
        return ", ".join((self.engine, start, self.role, self.fault, self.moment))

    @property
    def deadline_seconds(self):
        """How long after the fault everything has to have ended."""
        first = START_SECONDS if self.moment in ("start", "meeting") else self.timeout_seconds
        return max(first, self.timeout_seconds) + SECONDS_OF_GRACE + self.work_seconds

    def exits_of(self, process):
        """The exit codes that a process may have."""
        if process == self.role and not self.launched:
            return self.faulty_exits
        return self.chief_exits or self.exits if process.startswith("chief") else self.exits

    @property
    def crosses_hosts(self):
        """Whether each process is on a host of its own."""
        return self.fault in NETWORK_FAULTS


# What becomes of a process that meets the fault, and which code the launcher of its job returns.
FAULTY_EXITS = {
    "SIGKILL": (KILLED,),
    "SIGTERM": (TERMINATED, 143),
    "SIGSTOP": (None,),
    "exception": (1,),
    "exit": (0,),
    "memory": (KILLED,),
    "full disk": (2,),
}
LAUNCHER_EXITS = {"SIGKILL": (137,), "SIGTERM": (143,), "exception": (1,), "memory": (137,), "full disk": (2,)}
TRAINS_ON = {"named": "", "exits": (0,), "faulty_exits": (0,), "work_seconds": 30}
LAST = {"epochs": 3, "exits": (0, 3)}  # nothing is lost when the training is done, or the loss is named
FULL_DISK = {"says": "No space left"}


def by_hand(engine, role, fault, *moments, **more):
    """Rows of a job without a launcher, as on several machines: the others name the process, and end."""
    more = {"named": role, "faulty_exits": FAULTY_EXITS.get(fault, (3,))} | more
    return [Row(engine, role, fault, moment, **more) for moment in moments]


def launched(engine, role, fault, *moments, **more):
    """Rows of a job of the launcher, which ends all processes, and names the one."""
    more = {"named": "" if role == "launcher" else role, "exits": LAUNCHER_EXITS.get(fault, (3,))} | more
    return [Row(engine, role, fault, moment, launched=True, **more) for moment in moments]


def weak_network(engine, *moments, work_seconds=30):
    """Rows of a network that delays, over which a job trains, and that loses a third, where it may end by name."""
    for moment in moments:
        more = {"epochs": 1} if moment == "meeting" else {"stops": True}
        more = TRAINS_ON | more | {"work_seconds": work_seconds}
        yield from by_hand(engine, "worker 1", "delay", moment, **more)
        more |= {"named": "worker", "exits": (0, 3), "faulty_exits": (0, 3), "timeout_seconds": 20}
        yield from by_hand(engine, "worker 1", "loss", moment, **more)


def together(engine, **options):
    """Rows of processes that end when one of them is lost."""
    more = {"options": options}
    return [
        *by_hand(engine, "worker 1", "SIGKILL", "training", **more),
        *by_hand(engine, "worker 1", "SIGSTOP", "training", **more),
        *by_hand(engine, "worker 1", "exception", "training", **more),
        *by_hand(engine, "worker 1", "cut", "meeting", "training", **more),
    ]


SERVED, TWO_WORKERS = ("chief", "worker", "ps"), ("chief", "worker", "worker", "ps")
LAUNCH_SERVED = ("--workers", "1", "--ps", "1")


def served(role, fault, *moments, **more):
    """Rows of a parameter server by hand: all processes that live name the process, and end."""
    more = {"roles": SERVED, "chief_exits": (3,)} | more
    return by_hand("parameter_server", role, fault, *moments, **more)


def worker_lost(fault, *moments, **more):
    """Rows of a parameter server that goes on without one of its workers."""
    more = {
        "roles": TWO_WORKERS,
        "named": "",
        "exits": (0,),
        "chief_exits": (0,),
        "stops": True,
        "work_seconds": 10,
    } | more
    return served("worker 1", fault, *moments, **more)


MPI = {"arguments": ("--mpi",)}
RANK_LOST = MPI | {"named": "rank 1", "exits": tuple(range(1, 256))}  # by `mpirun`, which names ranks itself


ROWS = [
    *together("multiworker"),
    *by_hand("multiworker", "worker 1", "exit", "training"),
    *by_hand("multiworker", "worker 1", "unresolvable", "start"),
    *launched("multiworker", "worker 1", "SIGSTOP", "training"),
    *by_hand("multiworker", "worker 1", "SIGKILL", "start", "validation", "checkpoint"),
    *by_hand("multiworker", "worker 1", "SIGKILL", "end", **LAST),
    *by_hand("multiworker", "worker 1", "SIGTERM", "training"),
    *by_hand("multiworker", "worker 1", "SIGSTOP", "start", "validation", "checkpoint"),
    *by_hand("multiworker", "worker 1", "SIGSTOP", "end", **LAST),
    *by_hand("multiworker", "worker 0", "SIGKILL", "training"),
    *by_hand("multiworker", "worker 0", "SIGTERM", "checkpoint"),
    *by_hand("multiworker", "worker 0", "SIGSTOP", "training"),
    *by_hand("multiworker", "worker 1", "exception", "validation"),
    *by_hand("multiworker", "worker 1", "exception", "end", **LAST),
    *by_hand("multiworker", "worker 0", "exception", "checkpoint"),
    *by_hand("multiworker", "worker 1", "memory", "training"),
    *by_hand("multiworker", "worker 0", "full disk", "training", **FULL_DISK),
    *by_hand("multiworker", "worker 1", "cut", "validation"),
    *by_hand("multiworker", "worker 1", "one-way", "meeting", "training"),
    *weak_network("multiworker", "meeting", "training"),
    *by_hand("multiworker", "worker 1", "strangers", "start", "training", epochs=40, **TRAINS_ON),
    *by_hand("multiworker", "worker 1", "clock", "start", epochs=3, **TRAINS_ON),
    *launched("multiworker", "worker 1", "SIGKILL", "start"),
    *launched("multiworker", "worker 1", "SIGTERM", "training"),
    *launched("multiworker", "worker 1", "exception", "training"),
    *launched("multiworker", "worker 1", "exit", "training"),
    *launched("multiworker", "worker 1", "memory", "training"),
    *launched("multiworker", "worker 0", "full disk", "training", **FULL_DISK),
    *launched("multiworker", "launcher", "SIGKILL", "training", exits=(KILLED,)),
    *launched("multiworker", "launcher", "SIGTERM", "training", "checkpoint"),
    *launched(
        *("multiworker", "worker 1", "SIGKILL", "training"),
        **{"arguments": ("--restarts", "1"), "epochs": 6, "exits": (0,), "work_seconds": 20},
    ),
    *together("horovod"),
    *by_hand("horovod", "worker 1", "exit", "training"),
    *by_hand("horovod", "worker 1", "unresolvable", "start"),
    *launched("horovod", "worker 1", "SIGSTOP", "training"),
    *by_hand("horovod", "worker 1", "SIGKILL", "start", "validation"),
    *by_hand("horovod", "worker 1", "SIGTERM", "training"),
    *by_hand("horovod", "worker 1", "one-way", "training"),
    *weak_network("horovod", "training", work_seconds=150),  # whose processes negotiate each exchange
    *by_hand("horovod", "worker 1", "strangers", "start", epochs=40, **TRAINS_ON),
    *by_hand("horovod", "worker 1", "clock", "start", epochs=3, **TRAINS_ON),
    *together("local_sgd"),
    *by_hand("local_sgd", "worker 1", "unresolvable", "start"),
    *by_hand("local_sgd", "worker 1", "strangers", "start", epochs=40, **TRAINS_ON),
    *weak_network("local_sgd", "training"),
    *together("gossip"),
    *launched("gossip", "worker 1", "SIGSTOP", "training"),
    *by_hand("gossip", "worker 1", "one-way", "training"),
    *together("pipeline", balance="memory"),
    *by_hand("pipeline", "worker 1", "exit", "training", options={"balance": "memory"}),
    *by_hand("pipeline", "worker 0", "SIGSTOP", "validation", options={"balance": "memory"}),
    *served("ps 0", "SIGKILL", "start", "training", "checkpoint"),
    *served("ps 0", "SIGTERM", "training"),
    *served("ps 0", "SIGSTOP", "start", "training", "validation"),
    *served("ps 0", "cut", "meeting", "training"),
    *served("ps 0", "one-way", "training"),
    *served("ps 0", "unresolvable", "start"),
    *served("chief 0", "SIGKILL", "start", "training"),
    *served("chief 0", "SIGSTOP", "training"),
    *served("chief 0", "cut", "training"),
    *served("chief 0", "exception", "training", faulty_exits=(1,)),
    *served("chief 0", "exit", "training", exits=(0,), faulty_exits=(0,)),
    *served("chief 0", "memory", "training", faulty_exits=(KILLED,)),
    *served("chief 0", "full disk", "training", **FULL_DISK),
    *served("worker 0", "strangers", "start", epochs=40, **TRAINS_ON | {"chief_exits": (0,)}),
    *served("worker 0", "clock", "start", epochs=3, **TRAINS_ON | {"chief_exits": (0,)}),
    *worker_lost("SIGKILL", "training", "validation"),
    *worker_lost("SIGTERM", "training"),
    *worker_lost("SIGSTOP", "training", work_seconds=SECONDS_TO_REASSIGN + 10),
    *worker_lost("cut", "training", work_seconds=SECONDS_TO_REASSIGN + 10, faulty_exits=(0, 3)),
    *worker_lost("SIGKILL", "start", named="worker 1", exits=(0, 3), chief_exits=(3,), stops=False),
    *launched("parameter_server", "ps 0", "SIGKILL", "training", arguments=LAUNCH_SERVED),
    *launched("parameter_server", "ps 0", "SIGSTOP", "training", arguments=LAUNCH_SERVED),
    *launched("parameter_server", "chief 0", "SIGKILL", "training", arguments=LAUNCH_SERVED),
    *launched("parameter_server", "chief 0", "SIGSTOP", "training", arguments=LAUNCH_SERVED),
    *launched("parameter_server", "launcher", "SIGKILL", "training", exits=(KILLED,), arguments=LAUNCH_SERVED),
    *launched("mpi", "worker 1", "SIGKILL", "start", "training", **RANK_LOST),
    *launched("mpi", "worker 1", "SIGTERM", "training", **RANK_LOST),
    *launched("mpi", "worker 1", "SIGSTOP", "training", "validation", **RANK_LOST),
    *launched("mpi", "worker 1", "exception", "training", **RANK_LOST),
    *launched("mpi", "worker 1", "exit", "training", **RANK_LOST),
    *launched("mpi", "launcher", "SIGKILL", "training", **MPI, exits=(KILLED,)),
    *launched("mpi", "launcher", "SIGTERM", "training", **MPI),
    *launched("mpi_split", "worker 1", "SIGKILL", "training", **RANK_LOST),
    *launched("mpi_split", "worker 1", "SIGSTOP", "training", **RANK_LOST),
    *launched("mpi_split", "worker 1", "exception", "training", **RANK_LOST),
]
# Every fifth row, so that all strategies and most faults are among them; each commit runs one seventh of these in CI.
IN_CI = ROWS[::5]
