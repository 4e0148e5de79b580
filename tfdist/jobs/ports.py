"""Ports of this machine, for TensorFlow's servers, which listen on every interface, and for tfdist's own."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat

from tfdist.jobs.world import World

# With this variable, TensorFlow's servers use a port although another process of the same user has bound it, if that
# process does not listen. So a port can be reserved for a process until the process ends.
SHARE = "TF_GRPC_REUSE_PORT"
BACKLOG = 128


def hold(port: int = 0) -> socket.socket:
    """A socket that reserves a free port, or `port`, for as long as it is open."""
    reserved = _on_every_interface()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("", port))
    return reserved


def listen(port: int, backlog: int = BACKLOG) -> socket.socket:
    """A socket that listens as TensorFlow's server will; `backlog` connections may wait to be accepted.

    Raises:
        OSError: the port is taken, or not allowed.
    """
    listener = _on_every_interface()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("", port))
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def listen_for(world: World) -> tuple[socket.socket, str | None]:
    """A socket that listens on a free port for the processes of a job, and the address to reach it by.

    If all processes are on this machine, it listens on the loopback interface. Otherwise it listens on every interface,
    over IPv6 too if the machine supports it, and the address is `None`.
    """
    if world.local_world_size == world.world_size:
        listener = socket.create_server(("localhost", 0), backlog=BACKLOG)
        return listener, str(listener.getsockname()[0])
    listener = _on_every_interface()
    listener.bind(("", 0))
    listener.listen(BACKLOG)
    return listener, None


def hang_up(host: str, port: int) -> int:
    """Ends all connections of this process to a port; returns their number."""
    addresses = {info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    ended = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = int(name)
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    peer = connection.getpeername()
                    if (str(peer[0]).removeprefix("::ffff:"), peer[1]) in addresses:
                        connection.shutdown(socket.SHUT_RDWR)
                        ended += 1
    return ended


def shared() -> bool:
    """Whether another process reserves the ports of this process."""
    return os.environ.get(SHARE, "0").lower() in ("1", "true")


def _on_every_interface() -> socket.socket:
    """A socket for IPv4, and for IPv6 too if the machine supports it."""
    if not _has_ipv6():
        return socket.socket(socket.AF_INET)
    dual_stack = socket.socket(socket.AF_INET6)
    dual_stack.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return dual_stack


@functools.cache
def _has_ipv6() -> bool:
    """Whether this machine supports IPv6, and it is enabled."""
    if not socket.has_dualstack_ipv6():
        return False
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::", 0))
        except OSError:
            return False
    return True
