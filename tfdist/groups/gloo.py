"""Connects the processes of a job for Horovod over Gloo, if TF_CONFIG or Slurm describes them.

This does what `horovodrun` does for the processes that it starts: environment variables contain the rank of each
process, and the chief runs the server through which the processes find each other.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping

import psutil

from tfdist.errors import UsageError
from tfdist.jobs import ports, rendezvous
from tfdist.jobs.tf_config import means_itself
from tfdist.jobs.world import World

RANK = "HOROVOD_RANK"


def meet(world: World, job_settings: Mapping[str, str], start_timeout_seconds: float) -> dict[str, str]:
    """Waits for all processes of `world`, and returns the environment variables with which Horovod connects them.

    Args:
        world: the job with the addresses of its processes, or a single process.
        job_settings: settings that must be the same in all processes.
        start_timeout_seconds: how long to wait for the processes.

    Raises:
        ClusterError: as `tfdist.jobs.rendezvous.meet`.
    """
    rendezvous.meet(world, job_settings, start_timeout_seconds)
    if world.world_size > 1 and world.is_chief:
        _serve(world.tasks[0].port)
    return variables(world)


def set_unless_set(settings: Mapping[str, str]) -> None:
    """Sets the environment variables of `settings` that the user has not set.

    Raises:
        UsageError: this machine does not have the network interface that is set.
    """
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    interface, existing = os.environ.get("HOROVOD_GLOO_IFACE"), psutil.net_if_addrs()
    if interface and interface not in existing:  # Gloo would end the process
        names = ", ".join(f"`{name}`" for name in sorted(existing))
        raise UsageError(
            f"`HOROVOD_GLOO_IFACE` is `{interface}`, and this machine has the network interfaces {names}",
            "name one of these, or unset it",
        )


def variables(world: World) -> dict[str, str]:
    """The environment variables with which `horovodrun` describes the job to a process, for Gloo."""
    hosts = [task.host for task in world.tasks] or ["localhost"]
    host = hosts[world.rank]
    # The machines that have a process with this local rank.
    across = [name for name, count in Counter(hosts).items() if count > world.local_rank]
    values = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": host,
        RANK: str(world.rank),
        "HOROVOD_SIZE": str(world.world_size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_world_size),
        "HOROVOD_CROSS_RANK": str(across.index(host)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_GLOO_IFACE": _interface(host),
    }
    if world.world_size > 1:
        chief = world.tasks[0]
        address = socket.gethostbyname(chief.host)
        values |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(chief.port)}
    return values


def _interface(host: str) -> str:
    """The network interface through which other machines reach this machine as `host`; empty if there is none."""
    if means_itself(host):
        return "lo"
    host_addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address in host_addresses for address in addresses):
            return name
    return ""


def _serve(port: int) -> None:
    """Starts Horovod's rendezvous server in the chief, on the chief's port of the job."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread

    class Server(RendezvousHTTPServer):
        allow_reuse_port = ports.shared()

    in_thread(target=Server(("", port), RendezvousHandler, False).serve_forever)
