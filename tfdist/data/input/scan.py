"""Finds the examples that can be decoded, in a separate process.

A dataset is loaded before a strategy chooses its devices, and TensorFlow must not be initialized before that. This
module alone unpickles, and only what its own process sent over a pipe.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping

import numpy as np

from tfdist.data.input.picture_files import Pictures
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec

# The numbers of the good examples of a split, and one sentence about each bad example.
Scan = tuple[np.ndarray, list[str]]


def scan_all(spec: DataSpec, files: Mapping[str, Pictures | Records]) -> dict[str, Scan]:
    """Decodes all examples of each split once, on all cores, in a separate process."""
    # Without a GPU, because the training process needs its memory.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.data.input.scan"],
        input=pickle.dumps((spec, dict(files))),
        capture_output=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"The check of `{spec.name}` failed:\n{done.stderr.decode(errors='replace')}")
    scans: dict[str, Scan] = pickle.loads(done.stdout)
    return scans


def _scan(spec: DataSpec, files: Pictures | Records) -> Scan:
    from tfdist.data.input import decoding

    decoder = decoding.Decoder(spec, files)
    numbers = decoding.numbers_of_good(decoder)
    bad = np.delete(np.arange(len(files)), numbers).tolist()
    return numbers, [decoder.problem(number) or f"`{files.name(number)}` cannot be read" for number in bad]


if __name__ == "__main__":
    spec, files = pickle.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pickle.dumps({split: _scan(spec, of_split) for split, of_split in files.items()}))
