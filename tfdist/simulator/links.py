"""The links of the simulated machines, and how a user sets them.

Each worker and the centre has an uplink and a downlink, and there may be a switch that carries all messages. A setting
is `[WHERE=]RATE[,LATENCY]`:

    1Gbit/s,0.1ms         all links of all workers and of the centre
    workers=1Gbit/s       all links of the workers
    centre=10Gbit/s       both links of the centre
    3.up=100Mbit/s,5ms    the uplink of worker 3
    switch=20Gbit/s       a switch; without this setting there is none

Later settings override earlier ones; a setting without a latency keeps the latency.

Synopsis:

    >>> links = Links.of(2, Link(latency_seconds=1e-4, bytes_per_second=1e9), ["centre.down=80Mbit/s,1ms"])
    >>> links.down[CENTRE]
    Link(latency_seconds=0.001, bytes_per_second=10000000.0)
    >>> links.up[0]
    Link(latency_seconds=5e-05, bytes_per_second=1000000000.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from tfdist.advisor.costs import Link, link_of
from tfdist.errors import UsageError

CENTRE = -1  # the place of the centre in the links, after those of the workers


@dataclass(frozen=True)
class Links:
    """All links; the latency of a message is the sum of the latencies of the links that it passes.

    Attributes:
        up: the uplinks of the workers, and then that of the centre.
        down: the downlinks of the workers, and then that of the centre.
        switch: the link that all messages share; `None` for a network without limits between the machines.
    """

    up: tuple[Link, ...]
    down: tuple[Link, ...]
    switch: Link | None = None

    @classmethod
    def of(cls, workers: int, every: Link, settings: Iterable[str] = ()) -> Links:
        """Returns the links of `workers` workers and a centre.

        Args:
            workers: the number of workers.
            every: the bandwidth of each link, and the latency of a message, half of it for each of its two links.
            settings: the links that are set, see the docstring of this module.

        Raises:
            UsageError: a setting is not valid.
        """
        each = dataclasses.replace(every, latency_seconds=every.latency_seconds / 2)
        links = {"up": [each] * (workers + 1), "down": [each] * (workers + 1)}
        switch = None
        for setting in settings:
            where, _, values = setting.rpartition("=")
            machine, _, direction = where.strip().partition(".")
            if machine == "switch" and not direction:
                switch = _with(Link(0.0, 0.0), values, setting)
                continue
            for side in _sides(direction, setting, workers):
                for place in _places(machine, setting, workers):
                    links[side][place] = _with(links[side][place], values, setting)
        return cls(tuple(links["up"]), tuple(links["down"]), switch)


def require_centre(settings: Iterable[str], algorithm: str, centred: Iterable[str]) -> None:
    """Raises `UsageError` if a setting is for the centre, and `algorithm` is not among those with one, `centred`."""
    for setting in settings:
        machine, _, _ = setting.rpartition("=")[0].strip().partition(".")
        if machine == "centre" and algorithm not in centred:
            raise UsageError(
                f"`--link` is `{setting}`, and `{algorithm}` has no centre",
                f"leave it out, or use an algorithm with a centre: {', '.join(f'`{name}`' for name in centred)}",
            )


def _sides(direction: str, setting: str, workers: int) -> tuple[str, ...]:
    if direction not in ("", "up", "down"):
        raise _unknown(setting, workers)
    return (direction,) if direction else ("up", "down")


def _places(machine: str, setting: str, workers: int) -> Iterable[int]:
    """The places in the links of the machines that a setting is for."""
    if machine == "centre":
        return (CENTRE,)
    if machine in ("", "workers"):
        return range(workers + (machine == ""))
    if machine.isdecimal() and int(machine) < workers:
        return (int(machine),)
    raise _unknown(setting, workers)


def _unknown(setting: str, workers: int) -> UsageError:
    where = setting.rpartition("=")[0].strip()
    return UsageError(
        f"`--link` is `{setting}`, and `{where}` is no link of {workers} workers",
        f"use `workers`, `centre`, `switch` or a rank from 0 to {workers - 1}; `.up` or `.down` after a rank, "
        "`workers` or `centre` sets one direction, as in `--link 0.up=100Mbit/s,5ms`",
    )


def _with(link: Link, values: str, setting: str) -> Link:
    """Returns `link` with the rate, and the latency if there is one, in `values`."""
    rate, comma, latency = (part.strip() for part in values.partition(","))
    try:
        parsed = link_of(rate, latency if comma else "0s", "--link")
    except (UsageError, ValueError) as error:
        raise UsageError(
            f"`--link` is `{setting}`, and `{values.strip()}` is no rate with or without a latency",
            "use bits per second, and after a comma a time, such as `1Gbit/s` or `100Mbit/s,5ms`",
        ) from error
    assert parsed is not None  # both are set
    return parsed if comma else dataclasses.replace(parsed, latency_seconds=link.latency_seconds)
