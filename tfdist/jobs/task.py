"""One process of a job, and the address on which it listens."""

from __future__ import annotations

import re
from dataclasses import dataclass

# In the order of the ranks.
ROLES = ("chief", "worker", "ps")


@dataclass(frozen=True)
class Task:
    """One process of a job: its role, its index among the processes with that role, and its address `host:port`."""

    role: str
    index: int
    address: str

    @property
    def host(self) -> str:
        """The host's name or address; an IPv6 address without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port, 1 to 65535."""
        return int(self.address.rpartition(":")[2])

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.address})"


def means_itself(host: str) -> bool:
    """Whether this name or address stands for the local host on every host, such as `localhost`."""
    return host.lower() in ("localhost", "::1", "0.0.0.0", "::") or bool(re.fullmatch(r"127(\.[0-9]+){3}", host))
