"""Finds the examples that can be decoded, in a separate process.

A dataset is loaded before a strategy chooses its devices, and TensorFlow must not be initialized before that.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from tfdist.data.spec import DataSpec

if TYPE_CHECKING:
    from tfdist.data.input.picture_files import Pictures
    from tfdist.data.input.tfrecords import Records

# For each split, the numbers of the usable examples, and sentences about the others.
Found = dict[str, tuple[np.ndarray, list[str]]]


def good(spec: DataSpec, files: Mapping[str, Pictures | Records]) -> Found:
    """Decodes all examples once, on all cores."""
    # No GPU, because the training process needs its memory.
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
    return pickle.loads(done.stdout)


def _good_of(spec: DataSpec, files: Pictures | Records) -> tuple[np.ndarray, list[str]]:
    from tfdist.data.input import decoding, tf_datasets

    decoder = decoding.Decoder(spec, files)
    numbers = tf_datasets.numbers_of_good(decoder)
    bad = np.delete(np.arange(len(files)), numbers).tolist()
    return numbers, [decoder.problem(number) or f"`{files.name(number)}` cannot be read" for number in bad]


if __name__ == "__main__":
    spec, files = pickle.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(pickle.dumps({split: _good_of(spec, of_split) for split, of_split in files.items()}))
