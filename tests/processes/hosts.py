"""Hosts on this machine: network namespaces with an address each, joined by a link that can be slowed and cut."""

import os
import shutil
import subprocess

import pytest

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 9))
LINK = "eth0"
SLOWED = "tbf rate 1gbit burst 128kb latency 50ms"


class Hosts:
    """Network namespaces of this machine; what they hold ends with them."""

    def __init__(self, count=2):
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

    def join(self):
        """Gives both hosts the ends of a cable."""
        one, other = self.names
        ip("link", "add", LINK, "netns", one, "type", "veth", "peer", "name", LINK, "netns", other)

    def close(self):
        for name in self.names:
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
        return ("ip", "netns", "exec", self.names[index])


def ip(*arguments):
    run_or_skip("ip", *arguments)


def run_or_skip(*command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this system does not allow `{' '.join(command)}`: {done.stderr.strip()}")
