"""Checks the loopback interface, the host's name, ports, proxies and ssh."""

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
from tfdist.jobs.tf_config import means_itself
from tfdist.jobs.world import World

PORTS_OF_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
SECONDS_TO_LOOK_UP = 5.0
# The variables that gRPC reads, in its order; it does not read names in capitals. TensorFlow's servers use gRPC.
# Source: gRPC's doc/environment_variables.md.
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
LOCALHOST = "localhost"  # the name under which the launcher connects the processes of one machine


def findings() -> list[Finding]:
    """The findings about the network."""
    return [*loopback(), *_own_name(), *_ports(), *proxies(), *_ssh()]


def loopback() -> Iterator[Finding]:
    """Checks that two processes of this machine can connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection((LOCALHOST, port), timeout=SECONDS_TO_LOOK_UP):
                pass
    except OSError as error:
        yield problem(
            "loopback",
            f"A process cannot connect to another process over `{LOCALHOST}`: {error.strerror or error}",
            "ip link set lo up; and check that /etc/hosts has the line `127.0.0.1 localhost`",
        )
    else:
        yield ok("loopback", f"A process can connect to another process over `{LOCALHOST}`")


def _own_name() -> Iterator[Finding]:
    name = socket.gethostname()
    addresses = look_up([name])[name]
    if addresses is None:
        yield note(
            "host name",
            f"`{name}`, the name of this host, has no address; MPI and other hosts may need it",
            f"add the line `ADDRESS {name}` to /etc/hosts, with the address by which other hosts reach this one",
        )
    elif not set(addresses) & own_addresses():
        yield note(
            "host name",
            f"`{name}`, the name of this host, resolves to {', '.join(addresses)}, which no network interface here has",
            f"correct the line of `{name}` in /etc/hosts, or its entry in the DNS",
        )
    else:
        yield ok("host name", f"`{name}` resolves to {', '.join(addresses)}")


def _ports() -> Iterator[Finding]:
    """Checks that the ports of Slurm jobs are disjoint from the ephemeral ports of the system."""
    try:
        first, last = map(int, PORTS_OF_SYSTEM.read_text(encoding="ascii").split())
    except (OSError, ValueError):  # not Linux
        return
    of_slurm = range(slurm.FIRST_PORT, slurm.FIRST_PORT + slurm.PORTS)
    ephemeral = f"The system assigns ephemeral ports from {first} to {last}"
    if first < of_slurm.stop and last >= of_slurm.start:
        yield note(
            "ports",
            f"{ephemeral}, and jobs under Slurm listen on some of {of_slurm.start} to {of_slurm.stop - 1}, which "
            "another program may then use",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )
    else:
        yield ok("ports", f"{ephemeral}, and jobs under Slurm listen on others")


def proxies() -> Iterator[Finding]:
    """Checks that gRPC does not send the messages of TensorFlow's servers to a proxy."""
    proxy = next((name for name in PROXIES if os.environ.get(name)), None)
    if proxy is None:
        yield ok("proxies", "No proxy is set for gRPC, which connects TensorFlow's servers")
        return
    exceptions = next((name for name in EXCEPTIONS if os.environ.get(name)), None)
    entries = [entry.strip() for entry in os.environ[exceptions].split(",")] if exceptions else []
    proxied = [host for host in _hosts_of_job() if not _is_exempt(host, entries)]
    if proxied:
        value = ",".join(dict.fromkeys([*filter(None, entries), *proxied]))
        yield problem(
            "proxies",
            f"`{proxy}` is set, and `{EXCEPTIONS[1]}` does not exempt {', '.join(f'`{host}`' for host in proxied)}: "
            "TensorFlow's servers would connect to each other through the proxy",
            f"export {exceptions or EXCEPTIONS[1]}={value}",
        )
    else:
        yield ok("proxies", f"`{proxy}` is set, and `{exceptions}` exempts the hosts of the job")


def _hosts_of_job() -> list[str]:
    try:
        tasks = World.detect(os.environ).tasks
    except UsageError:
        tasks = ()
    return list(dict.fromkeys([LOCALHOST, *(task.host for task in tasks)]))


def _is_exempt(host: str, entries: Iterable[str]) -> bool:
    """Whether gRPC uses no proxy for a host: an entry is a suffix of its name, or a network with its address."""
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
            "There is no `ssh` on the path, which `--hosts` needs to start processes on other machines",
            "apt-get install openssh-client",
        )
    else:
        yield ok("ssh", f"`{shutil.which('ssh')}` can start processes on other machines")


def own_addresses() -> set[str]:
    """The addresses of this machine's network interfaces, without IPv6 zones."""
    addresses = [address for interface in psutil.net_if_addrs().values() for address in interface]
    inet = [address for address in addresses if address.family in (socket.AF_INET, socket.AF_INET6)]
    return {str(address.address).partition("%")[0] for address in inet}


def is_here(host: str, addresses: Collection[str]) -> bool:
    """Whether `host`, which resolves to `addresses`, is this machine."""
    here = own_addresses()
    return means_itself(host) or any(address in here or address.startswith("127.") for address in addresses)


def look_up(hosts: Iterable[str]) -> dict[str, list[str] | None]:
    """Resolves hosts in parallel; the addresses are `None` for a host that has none or takes too long to resolve."""
    addresses: dict[str, list[str] | None] = {}

    def resolve(host: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses[host] = sorted({str(info[4][0]).partition("%")[0] for info in infos})

    unique = list(dict.fromkeys(hosts))
    call_within([lambda host=host: resolve(host) for host in unique], SECONDS_TO_LOOK_UP)  # type: ignore[misc]
    return {host: addresses.get(host) for host in unique}


def call_within(calls: Iterable[Callable[[], None]], seconds: float) -> None:
    """Makes calls in parallel daemon threads, and waits at most `seconds` for all of them together."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
