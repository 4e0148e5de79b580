"""The option `speeds`: how large the parts of the replicas are, for devices of which some are faster than others.

    speeds=None        equal parts
    speeds="3,1"       three quarters of each global batch for replica 0, a quarter for replica 1
    speeds="auto"      measured before the first step, and the same for the whole run

Each replica counts with its share of the examples, so that the result is that of equal parts, and of one device.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.jobs import consensus

AUTO = "auto"
# The parts of a batch are computed in 32 bits.
LARGEST_SUM = 10_000
# What `auto` measures: products of matrices of this size, for this time, after it has found how many that are.
MATRIX_ROWS = 256
SECONDS = 0.5
# Measured speeds are parts of the fastest one in this many steps; those which differ by less than a tenth are equal.
STEPS = 20
ALIKE = 0.9


def parsed(given: Any) -> tuple[int, ...] | str | None:
    """The speeds that a user has written.

    Raises:
        UsageError: they are neither whole numbers from 1 nor "auto".
    """
    if given is None or given == AUTO:
        return given
    parts = given.split(",") if isinstance(given, str) else given
    try:
        found = [int(part) for part in parts] if isinstance(parts, Sequence) else []
    except ValueError:
        found = []
    if not found or min(found) < 1 or any(float(one) != float(part) for one, part in zip(found, parts, strict=True)):
        raise UsageError(
            f"`speeds` is `{given}`", f"write a whole number from 1 for each replica, such as `3,1`, or `{AUTO}`"
        )
    divisor = math.gcd(*found)
    found = [one // divisor for one in found]
    if sum(found) > LARGEST_SUM:
        raise UsageError(f"`speeds` is `{given}`, which adds up to more than {LARGEST_SUM:,}", "use smaller numbers")
    return tuple(found)


def settled(
    wanted: tuple[int, ...] | str | None,
    peers: consensus.Peers,
    devices: Sequence[str],
    num_replicas: int,
) -> tuple[int, ...] | None:
    """The speeds of all replicas of a strategy; `None` where they are equal.

    Args:
        wanted: as `parsed` returns it, the same in all processes.
        peers: the processes of the job.
        devices: of the replicas of this process.
        num_replicas: of all processes.

    Raises:
        UsageError: they are not one per replica, or a process has several replicas.
        DisagreementError: the processes want others.
    """
    if peers.world.world_size > 1:
        consensus.require_equal(peers, {"speeds": _written(wanted)})
    if wanted is None:
        return None
    if peers.world.world_size > 1 and len(devices) > 1:
        raise UsageError(
            f"`speeds` is `{_written(wanted)}`, and each process has {len(devices)} devices",
            "start a process for each device, or leave `speeds` out",
        )
    found = _measured(peers, devices) if isinstance(wanted, str) else wanted
    if len(found) != num_replicas:
        raise UsageError(
            f"`speeds` is `{_written(wanted)}`, of {len(found)} replicas, and there are {num_replicas}",
            "write one number for each replica",
        )
    return None if len(set(found)) == 1 else found


def _written(wanted: tuple[int, ...] | str | None) -> str:
    return ",".join(map(str, wanted)) if isinstance(wanted, tuple) else str(wanted)


def _measured(peers: consensus.Peers, devices: Sequence[str]) -> tuple[int, ...]:
    """The speeds of all replicas, each process measuring its own at the same time as the others."""
    mine = [_products_per_second(device) for device in devices]
    of_all = [one for of_each in consensus.all_gather_object(peers, mine, "measures its speed") for one in of_each]
    fastest = max(of_all)
    if min(of_all) >= ALIKE * fastest:
        return (1,) * len(of_all)
    return tuple(max(1, round(STEPS * one / fastest)) for one in of_all)


def _products_per_second(device: str) -> float:
    """How many products of matrices the device computes a second."""
    with tf.device(device):
        matrix = tf.ones([MATRIX_ROWS, MATRIX_ROWS]) / MATRIX_ROWS
        product = functools.partial(_product, matrix)
        product()  # what is made once is not measured
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            product()
            products += 1
        return products / (time.perf_counter() - began)


def _product(matrix: tf.Tensor) -> None:
    """Waits for the result, on whatever device."""
    tf.matmul(matrix, matrix)[0, 0].numpy()
