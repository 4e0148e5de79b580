"""What the GPUs of this process do while a function runs: TensorFlow's profiler, read kernel by kernel."""

import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2


@dataclass
class Trace:
    """A trace of all GPUs.

    Attributes:
        copied_bytes: by the direction, "H2D", "D2H", "D2D" or "P2P".
        kernels: the names of the kernels that ran, and how often each.
    """

    copied_bytes: Counter = field(default_factory=Counter)
    kernels: Counter = field(default_factory=Counter)


def traced(function):
    """The trace of one call."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        try:
            function()
        finally:
            tf.profiler.experimental.stop()
        return read(folder)


def read(folder):
    """The trace that was written below a folder."""
    trace = Trace()
    for path in Path(folder).rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            if plane.name.startswith("/device:GPU"):
                _add(trace, plane)
    return trace


def _add(trace, plane):
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue  # what is derived from the streams
        for event in line.events:
            name = plane.event_metadata[event.metadata_id].name
            copied = re.fullmatch(r"[Mm]emcpy(H2D|D2H|D2D|P2P)", name)
            if copied is None:
                trace.kernels[name] += 1
            else:
                trace.copied_bytes[copied[1]] += _size_bytes(plane, event)


def _size_bytes(plane, event):
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            return int(re.search(r"(?:size|num_bytes):(\d+)", text)[1])
    return 0
