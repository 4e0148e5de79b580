"""Loopback, the host's name, and what stands between the processes of a job: proxies, and the lack of ssh."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import psutil

from tfdist.doctor.finding import Finding, note, ok, problem
from tfdist.errors import UsageError
from tfdist.jobs import slurm
from tfdist.jobs.task import means_itself
from tfdist.jobs.world import World

PORTS_OF_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
SECONDS_TO_LOOK_UP = 5.0
# Those that gRPC reads, in its order; TensorFlow's servers find each other by gRPC. Source: gRPC's
# doc/environment_variables.md. Names in capitals it does not read.
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
HERE = "localhost"  # by this name the launcher has the processes of one machine connect


def findings() -> list[Finding]:
    """What was found out about the network."""
    return [*loopback(), *_own_name(), *_ports(), *proxies(), *_ssh()]


def loopback() -> Iterator[Finding]:
    """Whether two processes of this machine can connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            place = listener.getsockname()
            with socket.create_connection((HERE, place[1]), timeout=SECONDS_TO_LOOK_UP):
                pass
    except OSError as error:
        yield problem(
            "loopback",
            f"A process cannot connect to another one by `{HERE}`: {error.strerror or error}",
            "ip link set lo up; and see that /etc/hosts has the line `127.0.0.1 localhost`",
        )
    else:
        yield ok("loopback", f"A process can connect to another one by `{HERE}`")


def _own_name() -> Iterator[Finding]:
    name = socket.gethostname()
    found = look_up([name])[name]
    elsewhere = found is not None and not set(found) & own_addresses()
    if found is None:
        yield note(
            "host name",
            f"`{name}`, the name of this host, has no address; MPI and other hosts may ask for it",
            f"add the line `ADDRESS {name}` to /etc/hosts, with the address by which other hosts reach this one",
        )
    elif elsewhere:
        yield note(
            "host name",
            f"`{name}`, the name of this host, leads to {', '.join(found)}, which no network interface here has",
            f"correct the line of `{name}` in /etc/hosts, or its entry in the DNS",
        )
    else:
        yield ok("host name", f"`{name}` leads to {', '.join(found)}")


def _ports() -> Iterator[Finding]:
    """Whether the ports of Slurm's jobs lie apart from those that the system hands out."""
    try:
        first, last = map(int, PORTS_OF_SYSTEM.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # another system
        return
    of_slurm = range(slurm.FIRST_PORT, slurm.FIRST_PORT + slurm.PORTS)
    handed_out = f"The system hands out the ports {first} to {last}"
    if first < of_slurm.stop and last >= of_slurm.start:
        yield note(
            "ports",
            f"{handed_out}, and jobs under Slurm listen on some of {of_slurm.start} to {of_slurm.stop - 1}, which "
            "another program may then hold",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    else:
        yield ok("ports", f"{handed_out}, and jobs under Slurm listen on others")


def proxies() -> Iterator[Finding]:
    """Whether gRPC would send the messages of TensorFlow's servers to a proxy."""
    named = next((name for name in PROXIES if os.environ.get(name)), None)
    if named is None:
        yield ok("proxies", "No proxy is set for gRPC, by which TensorFlow's servers find each other")
        return
    excepted = next((name for name in EXCEPTIONS if os.environ.get(name)), None)
    entries = [entry.strip() for entry in os.environ[excepted].split(",")] if excepted else []
    lost = [host for host in _hosts_of_job() if not _is_excepted(host, entries)]
    if lost:
        listed = ",".join(dict.fromkeys([*filter(None, entries), *lost]))
        yield problem(
            "proxies",
            f"`{named}` is set, and `{EXCEPTIONS[1]}` does not except {', '.join(f'`{host}`' for host in lost)}: "
            "TensorFlow's servers would look for each other at the proxy",
            f"export {excepted or EXCEPTIONS[1]}={listed}",
        )
    else:
        yield ok("proxies", f"`{named}` is set, and `{excepted}` excepts the hosts of the job")


def _hosts_of_job() -> list[str]:
    try:
        tasks = World.detect(os.environ).tasks
    except UsageError:
        tasks = ()
    return list(dict.fromkeys([HERE, *(task.host for task in tasks)]))


def _is_excepted(host: str, entries: Iterable[str]) -> bool:
    """Whether gRPC takes no proxy for a host: an entry is the end of its name, or a network that has its address."""
    for entry in filter(None, entries):
        with contextlib.suppress(ValueError):
            if "/" in entry and ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        if host.lower().endswith(entry.lower()):
            return True
    return False


def _ssh() -> Iterator[Finding]:
    if shutil.which("ssh") is None:
        yield note(
            "ssh",
            "There is no `ssh` on the path, by which `--hosts` starts processes on other machines",
            "apt-get install openssh-client",
        )
    else:
        yield ok("ssh", f"`{shutil.which('ssh')}` can start processes on other machines")


def own_addresses() -> set[str]:
    """The addresses of this machine's network interfaces, without the zones of IPv6."""
    found = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    inet = [one for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]
    return {str(one.address).partition("%")[0] for one in inet}


def is_here(host: str, addresses: Collection[str]) -> bool:
    """Whether one of the addresses that `host` leads to is this machine's."""
    own = own_addresses()
    return means_itself(host) or any(one in own or one.startswith("127.") for one in addresses)


def look_up(hosts: Iterable[str]) -> dict[str, list[str] | None]:
    """The addresses of hosts, all looked up at the same time; `None` for one that has none, or is not found in time."""
    found: dict[str, list[str] | None] = {}

    def ask(host: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found[host] = sorted({str(info[4][0]).partition("%")[0] for info in infos})

    asked = list(dict.fromkeys(hosts))
    in_time([lambda host=host: ask(host) for host in asked], SECONDS_TO_LOOK_UP)  # type: ignore[misc]
    return {host: found.get(host) for host in asked}


def in_time(calls: Iterable[Callable[[], None]], seconds: float) -> None:
    """Makes calls that have no time limit of their own, and does not wait longer than `seconds` for all of them."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
