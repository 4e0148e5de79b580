"""Hosts on this machine: network namespaces with an address each, joined by a link that can be slowed and cut.

Their /etc/hosts is that of Debian, in which a host's own name stands for a loopback address.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 9))
NAMES = tuple(f"debian-{number}" for number in range(1, 9))
LINK = "eth0"
SLOWED = "tbf rate 1gbit burst 128kb latency 50ms"


class Hosts:
    """Network namespaces of this machine; what they hold ends with them."""

    def __init__(self, count=2, called=NAMES):
        self.called = called
        # The names are this process' own: others may run the same tests.
        self.names = [f"tfdist-{os.getpid()}-{index}" for index in range(count)]

    def open(self):
        if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
            pytest.skip("only root can make network namespaces, with `ip` and `tc`")
        for name in self.names:
            ip("netns", "add", name)
        self.join()
        for name, address in zip(self.names, ADDRESSES, strict=False):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", LINK, "up")
        for index in range(len(self.names)):
            self._folder(index).mkdir(parents=True)
            addresses = [*ADDRESSES[:index], "127.0.1.1", *ADDRESSES[index + 1 :]]
            lines = [f"{address} {name}\n" for address, name in zip(addresses, self.called, strict=False)]
            (self._folder(index) / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def join(self):
        """Gives both hosts the ends of a cable."""
        one, other = self.names
        ip("link", "add", LINK, "netns", one, "type", "veth", "peer", "name", LINK, "netns", other)

    def close(self):
        for index, name in enumerate(self.names):
            shutil.rmtree(self._folder(index), ignore_errors=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def slow_down(self):
        for name in self.names:
            run_or_skip("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *SLOWED.split())

    def cut(self):
        ip("-n", self.names[1], "link", "set", LINK, "down")

    def mend(self):
        ip("-n", self.names[1], "link", "set", LINK, "up")

    def inside(self, index):
        """What to put before a command that runs on one of them."""
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.called[index])
        return ("ip", "netns", "exec", self.names[index], *named)

    def _folder(self, index):
        """What `ip netns exec` puts over /etc."""
        return Path("/etc/netns", self.names[index])


def ip(*arguments):
    run_or_skip("ip", *arguments)


def run_or_skip(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this system does not allow `{' '.join(command)}`: {done.stderr.strip()}")
