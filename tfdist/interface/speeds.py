"""The option `speeds`: unequal batch parts for replicas on devices of different speed.

    speeds=None        equal parts
    speeds="3,1"       three quarters of each global batch for replica 0, a quarter for replica 1
    speeds="auto"      measured before the first step, and constant for the whole run

Each replica is weighted by its share of the examples, so that the result is the same as with equal parts or one device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.jobs import consensus
from tfdist.terminal import counted

AUTO = "auto"
# The parts of a batch are computed in 32 bits.
LARGEST_SUM = 10_000
# "auto" multiplies matrices with this number of rows for this time.
MATRIX_ROWS = 256
SECONDS = 0.5
# Measured speeds are rounded to this number of levels up to the fastest, and count as equal within this ratio.
LEVELS = 20
EQUAL_RATIO = 0.9


def parse(option: Any) -> tuple[int, ...] | str | None:
    """Parses the option: returns the speeds, reduced by their common divisor, or "auto" or `None`.

    Raises:
        UsageError: the option is neither positive integers nor "auto".
    """
    if option is None or option == AUTO:
        return option
    parts = option.split(",") if isinstance(option, str) else option
    try:
        speeds = [int(part) for part in parts] if isinstance(parts, Sequence) else []
    except ValueError:
        speeds = []
    if (
        not speeds
        or min(speeds) < 1
        or any(float(speed) != float(part) for speed, part in zip(speeds, parts, strict=True))
    ):
        raise UsageError(
            f"`speeds` is `{option}`", f"write a positive integer for each replica, such as `3,1`, or `{AUTO}`"
        )
    divisor = math.gcd(*speeds)
    speeds = [speed // divisor for speed in speeds]
    if sum(speeds) > LARGEST_SUM:
        raise UsageError(f"`speeds` is `{option}`, which adds up to more than {LARGEST_SUM:,}", "use smaller numbers")
    return tuple(speeds)


def resolve(
    option: Any,
    peers: consensus.Peers,
    devices: Sequence[str],
    num_replicas: int,
) -> tuple[int, ...] | None:
    """Returns the speeds of all replicas of a strategy; `None` if they are equal.

    Args:
        option: the option `speeds`, which must be the same in all processes.
        peers: the processes of the job.
        devices: the devices of this process's replicas.
        num_replicas: the number of replicas in all processes.

    Raises:
        UsageError: see `parse`; or there is not one speed per replica, or a process has several replicas.
        DisagreementError: the processes have different settings.
    """
    speeds = parse(option)
    text = ",".join(map(str, speeds)) if isinstance(speeds, tuple) else str(speeds)
    if peers.world.world_size > 1:
        consensus.require_equal(peers, {"speeds": text})
    if speeds is None:
        return None
    if peers.world.world_size > 1 and len(devices) > 1:
        raise UsageError(
            f"`speeds` is `{option}`, and each process has {len(devices)} devices",
            "start a process for each device, or leave `speeds` out",
        )
    resolved = _measured(peers, devices) if isinstance(speeds, str) else speeds
    if len(resolved) != num_replicas:
        example = ",".join([str(resolved[0]), *["1"] * (num_replicas - 1)]) if num_replicas <= 8 else "3,1"
        raise UsageError(
            f"`speeds` is `{option}`, which is {counted(len(resolved), 'number')} for {num_replicas} replicas, and "
            "speeds are relative to each other",
            f"write one number for each replica, such as `{example}`",
        )
    return None if len(set(resolved)) == 1 else resolved


def _measured(peers: consensus.Peers, devices: Sequence[str]) -> tuple[int, ...]:
    """Returns the speeds of all replicas; all processes measure their devices at the same time."""
    local = [_products_per_second(device) for device in devices]
    gathered = consensus.all_gather_object(peers, local, "measures its speed")
    rates = [rate for of_process in gathered for rate in of_process]
    fastest = max(rates)
    if min(rates) >= EQUAL_RATIO * fastest:
        return (1,) * len(rates)
    return tuple(max(1, round(LEVELS * rate / fastest)) for rate in rates)


def _products_per_second(device: str) -> float:
    """Measures the number of matrix products that the device computes per second."""
    with tf.device(device):
        matrix = tf.ones([MATRIX_ROWS, MATRIX_ROWS]) / MATRIX_ROWS

        def multiply() -> None:
            tf.matmul(matrix, matrix)[0, 0].numpy()  # waits for the result on any device

        multiply()  # initialization is not measured
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            multiply()
            products += 1
        return products / (time.perf_counter() - began)
