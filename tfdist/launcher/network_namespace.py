"""Isolates a job's network: TensorFlow's servers listen on every interface, without authentication.

A network namespace has a loopback interface and nothing else, so that only processes in it can connect.
Source: network_namespaces(7), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def close() -> bool:
    """Moves this process, and the processes that it starts later, into a new network namespace.

    Returns:
        Whether the system allowed it. If it did not, nothing has changed.
    """
    user, group = os.geteuid(), os.getegid()
    if not _unshare(_CLONE_NEWNET):
        if not _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
            return False
        # The user and the group stay the same in the namespace.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    return True


def _unshare(flags: int) -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(flags) == 0
