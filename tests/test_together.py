"""The fingerprint of batches: the same for the same, another for another, whatever a batch is made of."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.input import job_feeds

FLOATS = np.arange(24, dtype="float32").reshape(6, 4)
ROWS = [[1, 2], [], [3]]
BATCHES = {
    "floats": (FLOATS, FLOATS + np.eye(6, 4, dtype="float32")),
    "a bit of a float": (FLOATS, FLOATS + np.float32(1e-6) * np.eye(6, 4, dtype="float32")),
    "order of the examples": (FLOATS, FLOATS[::-1]),
    "half precision": (FLOATS.astype("float16"), FLOATS.astype("float16") + 1),
    "brain floats": (tf.cast(FLOATS, tf.bfloat16), tf.cast(FLOATS + 1, tf.bfloat16)),
    "integers": (np.arange(6), np.arange(1, 7)),
    "truth values": (np.array([True, False]), np.array([False, True])),
    "complex numbers": (FLOATS + 1j, FLOATS + 2j),
    "text": (np.array(["a", "b"]), np.array(["ab", ""])),
    "no text": (np.array(["a"]), np.array([], str)),
    "one example fewer": (FLOATS, FLOATS[:-1]),
    "ragged rows": (tf.ragged.constant(ROWS), tf.ragged.constant([[1], [2], [3]])),
    "places of a sparse tensor": (tf.sparse.eye(3), tf.SparseTensor([[0, 0], [1, 2], [2, 1]], [1.0] * 3, [3, 3])),
    "absent targets": ((FLOATS, None), (FLOATS, FLOATS)),
    "structures": ({"a": FLOATS, "b": (FLOATS,)}, {"a": FLOATS, "b": (FLOATS + 1,)}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_fingerprint_tells_batches_apart(name):
    one, other = ([job_feeds.fingerprint(batch).numpy().tobytes() for _ in range(2)] for batch in BATCHES[name])
    assert one[0] == one[1] != other[0] == other[1]


def test_a_fingerprint_is_that_of_all_batches_so_far_in_their_order():
    fingerprints = [job_feeds.BatchFingerprint() for _ in range(3)]
    for one, batches in zip(fingerprints, ([1, 2, 3], [1, 2, 3], [2, 1, 3]), strict=True):
        for batch in batches:
            one.add(tf.constant(batch))
    assert str(fingerprints[0]) == str(fingerprints[1]) != str(fingerprints[2])
