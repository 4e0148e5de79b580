"""Hosts that are joined by a switch in this process, which can delay, lose and cut what they send.

Linux' own `netem` does this too, but not every kernel has it.
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time

import pytest

from tests.processes.hosts import LINK, Hosts

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65536


class SwitchedHosts(Hosts):
    """Network namespaces on one switch.

    Attributes:
        frames: how many the hosts have sent.
        delay_seconds: how long each frame is kept.
        loss: the fraction of frames that are lost, at random.
        cut: the hosts that neither send nor receive.
        mute: the hosts that receive, but do not send.
    """

    def __init__(self, count):
        super().__init__(count)
        self.frames, self.delay_seconds, self.loss = 0, 0.0, 0.0
        self.cut, self.mute = set(), set()
        self._ports, self._closed = [], threading.Event()
        self._relay = threading.Thread(target=self._relay_frames, daemon=True)

    def join(self):
        self._ports = [_plugged_into(name) for name in self.names]
        self._relay.start()

    def close(self):
        self._closed.set()
        if self._relay.is_alive():
            self._relay.join()
        for port in self._ports:
            os.close(port)
        super().close()

    def _relay_frames(self):
        kept, order, chance = [], itertools.count(), random.Random(0)
        poll = select.poll()
        for port in self._ports:
            poll.register(port, select.POLLIN)
        while not self._closed.is_set():
            while kept and kept[0][0] <= time.monotonic():
                _, _, sender, frame = heapq.heappop(kept)
                self._deliver(sender, frame)
            wait_seconds = min(0.1, max(0.0, kept[0][0] - time.monotonic())) if kept else 0.1
            for port, _ in poll.poll(wait_seconds * 1000):
                sender = self._ports.index(port)
                for frame in _read_all(port):
                    self.frames += 1
                    if sender not in self.cut | self.mute and chance.random() >= self.loss:
                        heapq.heappush(kept, (time.monotonic() + self.delay_seconds, next(order), sender, frame))

    def _deliver(self, sender, frame):
        for receiver, port in enumerate(self._ports):
            if receiver != sender and receiver not in self.cut:
                try:
                    os.write(port, frame)
                except OSError:  # its queue is full, or the interface is not up yet: a frame is lost
                    continue


def _read_all(port):
    """The frames that are there now, but only so many that the others get their turn."""
    for _ in range(64):
        try:
            yield os.read(port, _FRAME_BYTES)
        except OSError:
            return


def _plugged_into(namespace):
    """A file descriptor of what a new interface in `namespace` sends and receives."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = (os.open(path, os.O_RDONLY) for path in ("/proc/thread-self/ns/net", f"/run/netns/{namespace}"))
    try:
        libc.setns(there, 0)
        port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(port, _TUNSETIFF, struct.pack("16sH22s", LINK.encode(), _IFF_TAP | _IFF_NO_PI, b""))
    except OSError as error:
        pytest.skip(f"this system does not allow network interfaces of a program: {error}")
    finally:
        libc.setns(here, 0)
        os.close(here)
        os.close(there)
    return port
