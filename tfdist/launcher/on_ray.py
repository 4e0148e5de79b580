"""Runs the agents of a job as actors of a Ray cluster: one actor for each process, in one placement group.

An actor starts the agent of its process, and relays its input and output between Ray's calls and the agent's streams.
The rest is as on any other host. When the launcher dies, Ray ends its actors, and each agent ends its process.

Source: Ray 2.60, https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html and
https://docs.ray.io/en/latest/ray-core/actors/async_api.html.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist import extras
from tfdist.errors import EXIT_CLUSTER, ClusterError, UsageError
from tfdist.launcher import agent
from tfdist.launcher.hosts import MAX_LINE_BYTES, Place
from tfdist.launcher.job import Job

with extras.importing("ray", "`--on ray`"):
    import ray
    import ray.exceptions
    from ray.util.placement_group import PlacementGroup, placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

OUTPUTS = 2


@contextlib.contextmanager
def cluster(job: Job) -> Iterator[Cluster]:
    """Connects to the cluster that `RAY_ADDRESS` names; without it, starts one on this machine.

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    _connect(len(job.roles), job.start_seconds)
    try:
        yield Cluster(job)
    finally:
        ray.shutdown()


def _connect(processes: int, seconds: float) -> None:
    settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        cores = max(processes, len(os.sched_getaffinity(0)))
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **settings)
        return
    _check_address(address, seconds)
    try:
        ray.init(address=address, **settings)
    except (ConnectionError, RuntimeError) as error:
        raise _unreachable(address, error.__cause__ or error) from error


def _check_address(address: str, seconds: float) -> None:
    """Connects to the address of a cluster, because Ray repeats its own attempts for minutes."""
    if "://" in address:
        raise UsageError(
            f"`RAY_ADDRESS` is `{address}`, from which Ray cannot start the processes of a job",
            "set it to `HOST:6379` on a machine of the cluster, or run the command there with `ray job submit`",
        )
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(
            f"`RAY_ADDRESS` is `{address}`, which is not `HOST:PORT`",
            "set it to `HOST:6379`, or to `auto` for the cluster of this machine",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: BaseException) -> ClusterError:
    reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return ClusterError(
        f"`RAY_ADDRESS` is `{address}`, and no Ray cluster accepts this job there: {reason[0]}",
        "correct it, or unset it to start a cluster on this machine; if the cluster asks for a token, set "
        "`RAY_AUTH_MODE=token`",
    )


class Cluster:
    """The part of a Ray cluster that a job uses: a placement group with a bundle for each process.

    Args:
        job: the job.
    """

    def __init__(self, job: Job):
        self._job = job
        worker = {"CPU": 1, "GPU": 1} if _has_gpus() else {"CPU": 1}
        self._bundles = [worker if role == "worker" else {"CPU": 1} for role, _ in job.roles]
        self._group: PlacementGroup | None = None

    def places(self) -> list[Place]:
        """The place of each rank, as soon as the cluster has room for all of them.

        Raises:
            ClusterError: there is no room within the time that a start may take.
        """
        if self._group is None:
            self._group = placement_group(self._bundles, strategy="PACK")
        if not self._group.wait(self._job.start_seconds):
            raise self._no_room()
        table = ray.util.placement_group_table(self._group)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        nodes = table["bundles_to_node_id"]
        return [
            Bundle(addresses[nodes[index]], self._group, index, bundle) for index, bundle in enumerate(self._bundles)
        ]

    def _no_room(self) -> ClusterError:
        free = ray.available_resources()
        wanted, there = (
            ", ".join(f"{total.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if total.get(name))
            for total in (self._total(), free)
        )
        return ClusterError(
            f"The Ray cluster had no room for the {len(self._bundles)} processes of the job within "
            f"{self._job.start_seconds:g} s (needed: {wanted}; free: {there or 'nothing'})",
            "start fewer processes, or wait for other jobs; `ray status` shows what there is"
            + ("; with `CUDA_VISIBLE_DEVICES=` the job needs no GPUs" if self._total()["GPU"] else ""),
        )

    def _total(self) -> dict[str, float]:
        return {name: sum(bundle.get(name, 0) for bundle in self._bundles) for name in ("CPU", "GPU")}


def _has_gpus() -> bool:
    """Whether the processes are to train on GPUs: each on one of the cluster's, unless they are hidden."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and ray.cluster_resources().get("GPU", 0) > 0


class Bundle(Place):
    """A bundle of the placement group, with one process.

    Args:
        name: the address of its node.
        group: the placement group.
        index: the number of the bundle, which is the rank of its process.
        resources: what the bundle reserves.
    """

    name: str
    hint = "check with `ray status` that the node is alive, and that tfdist is installed there at the same path"
    has_own_gpus = True

    def __init__(self, name: str, group: PlacementGroup, index: int, resources: Mapping[str, float]):
        self.name = name
        self._where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        self._resources = resources

    async def start_agent(self, ports: Sequence[str]) -> _ActorProcess:
        """Starts an actor in the bundle, and the agent in it."""
        actor = _RemoteActor.options(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0),
            scheduling_strategy=self._where,
        ).remote()
        process = _ActorProcess(actor, self.name)
        await process.start([sys.executable, "-m", agent.__name__, *ports], os.getcwd())
        return process


class _Actor:
    """The agent's side of the connection."""

    async def start(self, command: list[str], cwd: str, python_path: str | None) -> None:
        environment = os.environ | ({} if python_path is None else {"PYTHONPATH": python_path})
        self._agent = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=cwd, env=environment, start_new_session=True
        )

    async def read(self, output: int) -> bytes:
        reader = (self._agent.stdout, self._agent.stderr)[output]
        assert reader is not None
        return await reader.read(agent.CHUNK_BYTES)

    async def write(self, chunk: bytes) -> None:
        assert self._agent.stdin is not None
        self._agent.stdin.write(chunk)

    async def close_input(self) -> None:
        assert self._agent.stdin is not None
        self._agent.stdin.close()

    async def wait(self) -> int:
        return await self._agent.wait()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._agent.kill()


# Concurrent calls: each output is read by a call that waits for the next chunk.
_RemoteActor = ray.remote(max_restarts=0, max_concurrency=16)(_Actor)


class _ActorProcess:
    """The launcher's side of the connection, in the form of `asyncio.subprocess.Process`."""

    def __init__(self, actor: Any, node: str):
        self._actor = actor
        self._node = node
        self.returncode: int | None = None
        self.stdin = _Input(actor)
        self._outputs = [_Output(actor, number) for number in range(OUTPUTS)]
        self.stdout, self.stderr = (output.reader for output in self._outputs)
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, command: list[str], cwd: str) -> None:
        self._tasks = [asyncio.create_task(self._run(command, cwd))]

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self._actor.kill.remote()

    async def _run(self, command: list[str], cwd: str) -> None:
        try:
            await self._actor.start.remote(command, cwd, os.environ.get("PYTHONPATH"))
            await asyncio.gather(*(output.copy() for output in self._outputs))
            self.returncode = await self._actor.wait.remote()
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            reason = str(error).strip().partition("\n")[0]
            self.stderr.feed_data(f"error: The actor of Ray on the node {self._node} is lost: {reason}\n".encode())
            self.returncode = EXIT_CLUSTER
        finally:
            for output in self._outputs:
                output.reader.feed_eof()
            self._ended.set()
            ray.kill(self._actor)


class _Input:
    """The agent's input."""

    def __init__(self, actor: Any):
        self._actor = actor

    def write(self, chunk: bytes) -> None:
        self._actor.write.remote(chunk)

    def close(self) -> None:
        self._actor.close_input.remote()


class _Output(asyncio.Transport):
    """One of the agent's outputs; as a transport, it is paused while the launcher has not read what has arrived."""

    def __init__(self, actor: Any, number: int):
        super().__init__()
        self.reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        self.reader.set_transport(self)
        self._actor = actor
        self._number = number
        self._may_read = asyncio.Event()
        self._may_read.set()

    def pause_reading(self) -> None:
        self._may_read.clear()

    def resume_reading(self) -> None:
        self._may_read.set()

    async def copy(self) -> None:
        """Reads until the agent has closed its output."""
        while chunk := await self._actor.read.remote(self._number):
            self.reader.feed_data(chunk)
            await self._may_read.wait()
