"""Datasets: what a source holds, which rank gets which examples, and what is said when files are missing."""

from __future__ import annotations

import contextlib
import doctest
import gzip
import hashlib
import http.server
import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import filelock
import numpy as np
import pytest
import requests

import tfdist.data
import tfdist.models
from tfdist import registry
from tfdist.data import DataSpec, Source, check_labels, spec
from tfdist.data.formats import tfds
from tfdist.data.input import source
from tfdist.errors import DataError, UnknownNameError, UsageError
from tfdist.jobs.world import World

ROOT = Path(__file__).parent.parent
PREPARED = os.environ.get("TFDS_DATA_DIR", "")

needs_prepared_files = pytest.mark.skipif(
    not (Path(PREPARED) / "fashion_mnist").is_dir() or not PREPARED,
    reason="TFDS_DATA_DIR does not name a folder that holds fashion_mnist prepared by TensorFlow Datasets",
)


def numbered(examples: int) -> Source:
    """A source whose x is the number of the example."""
    x = np.arange(examples, dtype=np.float32)[:, np.newaxis]
    y = np.arange(examples) % 3
    return Source.from_arrays("numbered", classes=3, train=(x, y), validation=(x, y), test=(x, y))


def rank_batches(source: Source, split: str, batch: int, world_size: int, **options) -> list[list[list[int]]]:
    """[rank][batch] -> the numbers of the examples, after a check that the labels are theirs."""
    ranks = []
    for rank in range(world_size):
        batches = []
        for x, y in source.pipeline(split, batch, world=World(rank, world_size), **options):
            numbers = x.numpy()[:, 0].astype(int)
            assert y.numpy().tolist() == (numbers % 3).tolist()
            batches.append(numbers.tolist())
        ranks.append(batches)
    return ranks


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The global batches: the ranks' parts one after the other."""
    return [flat(parts) for parts in zip(*ranks, strict=True)]


def run_python(code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, text=True, capture_output=True, timeout=60, check=False)


# Sources


@pytest.mark.parametrize("module", [tfdist.data, source, spec, registry], ids=lambda module: module.__name__)
def test_the_synopsis_of_a_module_runs(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_names_and_mistakes_answer_without_importing_tensorflow():
    code = """
import sys
import tfdist.data, tfdist.models
from tfdist.errors import UnknownNameError
assert tfdist.data.names() and tfdist.models.names()
for call in (lambda: tfdist.data.load("fashion_mnst"), lambda: tfdist.models.build("cnm", None)):
    try:
        call()
    except UnknownNameError as error:
        print(error.sentence)
assert not {"tensorflow", "keras", "tensorflow_datasets", "sklearn"} & set(sys.modules)
"""
    began = time.monotonic()
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    for wrong, known in (("fashion_mnst", tfdist.data.names()), ("cnm", tfdist.models.names())):
        assert f"`{wrong}`: the names are {', '.join(f'`{name}`' for name in known)}" in result.stdout
    assert time.monotonic() - began < 5  # a fraction of a second; the machine may be busy


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_arrays_are_what_the_spec_says(name):
    data = tfdist.data.load(name)
    for split, count in data.spec.examples.items():
        x, y = data.arrays(split)
        assert x.shape == (count, *data.spec.input_shape) and x.dtype == np.float32 and x.flags.c_contiguous
        assert y.shape == (count,) and y.dtype == np.int32 and y.flags.c_contiguous
        assert x.min() >= 0 and x.max() <= 1 and x.max() > 0.9
        assert set(np.unique(y)) == set(range(data.spec.classes))


def test_the_splits_of_digits_are_all_of_scikit_learns_images_once():
    from sklearn.datasets import load_digits

    data = tfdist.data.load("digits")
    ours = np.concatenate([data.arrays(split)[0] for split in tfdist.data.SPLITS])
    theirs = load_digits().images / 16
    assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs.astype(np.float32)))


def test_arrays_are_made_once():
    data = tfdist.data.load("digits")
    assert data.arrays("test")[0] is data.arrays("test")[0]


def test_synthetic_is_any_shape_and_size_and_the_same_for_the_same_seed():
    options = {"shape": (5, 4, 3), "classes": 7, "train": 2000, "validation": 0, "test": 30}
    first, again, other = (tfdist.data.load("synthetic", seed=seed, **options) for seed in (1, 1, 2))
    assert first.spec.examples == {"train": 2000, "validation": 0, "test": 30}
    assert first.arrays("train")[0].shape == (2000, 5, 4, 3)
    np.testing.assert_array_equal(first.arrays("train")[0], again.arrays("train")[0])
    assert not np.array_equal(first.arrays("train")[0], other.arrays("train")[0])
    assert not np.array_equal(first.arrays("train")[0][:30], first.arrays("test")[0])


@pytest.mark.parametrize("shape", [(8, 8, 1), (16,)], ids=str)
def test_a_logistic_regression_learns_synthetic_labels(shape):
    from sklearn.linear_model import LogisticRegression

    data = tfdist.data.load("synthetic", shape=shape, classes=5, train=1000, test=500)
    (x, y), (x_test, y_test) = data.arrays("train"), data.arrays("test")
    model = LogisticRegression(max_iter=200).fit(x.reshape(len(x), -1), y)
    assert model.score(x_test.reshape(len(x_test), -1), y_test) > 0.95


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_limit_keeps_the_first_training_examples_and_nothing_else_changes(name):
    data = tfdist.data.load(name)
    limited = data.limit(100)
    assert limited.spec.examples == {**data.spec.examples, "train": 100}
    for split, count in limited.spec.examples.items():
        for few, all_ in zip(limited.arrays(split), data.arrays(split), strict=True):
            np.testing.assert_array_equal(few, all_[:count])
    assert data.spec.examples["train"] > 100


@pytest.mark.parametrize("limit", [0, -1, 1348])
def test_a_limit_that_cannot_be_kept_is_refused(limit):
    with pytest.raises(UsageError, match=f"`{limit}` training examples, dataset `digits` has 1347"):
        tfdist.data.load("digits").limit(limit)


# Pipelines


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in_order"])
@pytest.mark.parametrize("examples", [24, 25, 31, 3, 1])
def test_every_example_comes_once_and_global_batches_are_the_same_for_any_number_of_ranks(examples, shuffle):
    data = numbered(examples)
    alone = joined(rank_batches(data, "train", 8, 1, seed=3, epoch=2, shuffle=shuffle))
    assert Counter(flat(alone)) == Counter(range(examples))
    assert [len(batch) for batch in alone] == [8] * (examples // 8) + [examples % 8] * (examples % 8 > 0)
    for world_size in (2, 3, 5):
        ranks = rank_batches(data, "train", 8, world_size, seed=3, epoch=2, shuffle=shuffle)
        assert joined(ranks) == alone
        for parts in zip(*ranks, strict=True):
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1


def test_the_order_follows_from_seed_and_epoch_alone():
    data = numbered(50)
    order = {
        (seed, epoch): tuple(flat(joined(rank_batches(data, "train", 16, 1, seed=seed, epoch=epoch))))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(set(order.values())) == 4
    assert order[1, 1] == tuple(flat(joined(rank_batches(data, "train", 7, 2, seed=1, epoch=1))))


def test_only_training_examples_are_shuffled_by_default():
    data = numbered(20)
    for split in ("validation", "test"):
        assert flat(joined(rank_batches(data, split, 8, 1))) == list(range(20))
    assert flat(joined(rank_batches(data, "train", 8, 1))) != list(range(20))


def test_a_pipeline_says_its_length_and_shapes():
    data = tfdist.data.load("digits")
    batches = data.pipeline("train", 100, world=World(1, 2))
    assert int(batches.cardinality()) == 14
    x, y = batches.element_spec
    assert (x.shape.as_list(), x.dtype.name) == ([None, 8, 8, 1], "float32")
    assert (y.shape.as_list(), y.dtype.name) == ([None], "int32")


def test_a_tf_distribute_strategy_does_not_shard_a_pipeline_again():
    import tensorflow as tf

    policy = numbered(5).pipeline("train", 2).options().experimental_distribute.auto_shard_policy
    assert policy == tf.data.experimental.AutoShardPolicy.OFF


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(UsageError, match="global batch size is `0`"):
        numbered(5).pipeline("train", 0)


# Bad data


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_outside_the_classes_is_named_with_its_index(label):
    y = np.array([0, 1, label, 2, label])
    data = Source.from_arrays("mine", classes=3, train=(np.zeros((5, 2)), y))
    with pytest.raises(DataError, match=rf"Label 2 of dataset `mine` is `{label}`, outside its 3 classes \(2 of 5"):
        data.arrays("train")


def test_labels_that_are_not_integers_are_refused():
    with pytest.raises(DataError, match="type `float64`"):
        check_labels(np.array([0.0, 1.0]), numbered(3).spec)


def test_unsigned_bytes_are_labels_too():
    check_labels(np.array([0, 2], np.uint8), numbered(3).spec)


def test_a_split_without_examples_is_refused():
    without_validation = Source.from_arrays("few", classes=3, train=(np.zeros((5, 1)), np.arange(5) % 3))
    with pytest.raises(DataError, match="`few` has no examples in its split `validation`, so no batches"):
        without_validation.pipeline("validation", 2)


def test_an_unknown_split_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean `validation`"):
        numbered(5).arrays("valid")


def test_arrays_that_do_not_fit_the_spec_are_refused():
    data = Source(numbered(5).spec, lambda split, count: (np.zeros((count, 2)), np.zeros(count, int)))
    with pytest.raises(DataError, match=r"x of shape `\(5, 1\)` in its split `train`, found `\(5, 2\)`"):
        data.arrays("train")
    short = Source(numbered(5).spec, lambda split, count: (np.zeros((count, 1)), np.zeros(count - 1, int)))
    with pytest.raises(DataError, match=r"y of shape `\(5,\)` in its split `train`, found `\(4,\)`"):
        short.arrays("train")
    with pytest.raises(UsageError, match="`train` of the dataset `short` has 5 examples x and 4 targets y"):
        Source.from_arrays("short", classes=2, train=(np.zeros((5, 2)), np.zeros(4, int)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "poetry"}, "task `poetry`"),
        ({"input_shape": ()}, r"input_shape `\(\)`"),
        ({"input_shape": (0, 3)}, r"input_shape `\(0, 3\)`"),
        ({"classes": 0}, "classes `0`"),
        ({"examples": {"train": -1}}, "examples"),
        ({"examples": {"dev": 5}}, "split"),
        ({"class_names": ("a",)}, "class_names"),
        ({"target_shape": (0,)}, r"target_shape `\(0,\)`"),
        ({"vocabulary_size": -1}, "vocabulary_size `-1`"),
        ({"vocabulary_size": 3, "vocabulary": ("a",)}, "vocabulary"),
        ({"target_vocabulary": ("a",)}, "target_vocabulary"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_spec_that_no_dataset_can_have_is_refused(change, message):
    good = {
        "name": "d",
        "task": "classification",
        "input_shape": (2,),
        "classes": 2,
        "examples": {"train": 3},
    }
    DataSpec(**good)
    with pytest.raises(UsageError, match=message):
        DataSpec(**{**good, **change})


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(UsageError, match="`synthetic` does not know the option `size`: it takes `task`, `shape`"):
        tfdist.data.load("synthetic", size=3)
    with pytest.raises(UsageError, match="`digits` does not know the option `size`: it takes no options"):
        tfdist.data.load("digits", size=3)


# The user's own


def test_the_example_of_the_documentation_is_a_dataset(working_folder):
    text = (ROOT / "docs" / "datasets.md").read_text()
    code = re.search(r"```python\n# two_moons\.py\n(.*?)```", text, re.DOTALL)
    (working_folder / "two_moons.py").write_text(code.group(1))
    data = tfdist.data.load("two_moons:load", working_folder, noise=0.1)
    assert data.spec.name == "two_moons" and data.spec.classes == 2
    for split, count in data.spec.examples.items():
        assert len(data.arrays(split)[1]) == count > 0


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere:load", "No module `nowhere` for the dataset `nowhere:load`"),
        ("mine.deeper:load", "No module `mine.deeper`"),
        ("mine:absent", "`mine` has no `absent`"),
        ("mine:number", "is not callable: its type is `int`"),
        ("mine:wrong", "returned a `list`, not a `tfdist.data.Source`"),
        ("mine.py:", "not of the form `module:function`"),
        ("./mine.py:wrong", "hint: write `mine:wrong`"),
    ],
)
def test_a_dataset_of_the_users_own_that_cannot_be_used_is_named(working_folder, reference, message):
    (working_folder / "mine.py").write_text("number = 3\ndef wrong(data_dir): return []\n")
    with pytest.raises(UsageError, match=re.escape(message)):
        tfdist.data.load(reference)


def test_an_error_inside_the_users_module_comes_through(working_folder):
    (working_folder / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        tfdist.data.load("needs_more:load")


# TensorFlow Datasets: prepared files


@pytest.mark.sampled(1)
@needs_prepared_files
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_prepared_files_are_read_without_a_lock_a_network_or_a_trace(name, monkeypatch, capfd):
    def refuse(*arguments, **options):
        raise AssertionError("not to be used")

    monkeypatch.setattr(filelock, "FileLock", refuse)
    monkeypatch.setattr(requests.Session, "request", refuse)
    files = sorted((path, path.stat().st_mtime_ns) for path in Path(PREPARED).rglob("*"))
    data = tfdist.data.load(name, PREPARED).limit(2000)
    assert data.spec.examples == {"train": 2000, "validation": 5000, "test": 10000}
    assert len(data.spec.class_names) == 10
    x, y = data.arrays("train")
    assert x.shape == (2000, 28, 28, 1) and x.dtype == np.float32 and (x.min(), x.max()) == (0, 1)
    assert y.dtype == np.int32 and set(np.unique(y)) == set(range(10))
    assert sorted((path, path.stat().st_mtime_ns) for path in Path(PREPARED).rglob("*")) == files
    assert capfd.readouterr().out == ""


@pytest.mark.thorough
@needs_prepared_files
def test_validation_is_the_last_5000_stored_training_examples_and_pixels_are_bytes_over_255():
    import tensorflow_datasets as tfds

    stored = tfds.load("fashion_mnist", split="train", data_dir=PREPARED, as_supervised=True, batch_size=60000)
    images, labels = next(stored.as_numpy_iterator())
    data = tfdist.data.load("fashion_mnist", PREPARED)
    np.testing.assert_array_equal(data.limit(100).arrays("train")[1], labels[:100])
    for split, part in (("train", slice(55000)), ("validation", slice(55000, 60000))):
        x, y = data.arrays(split)
        np.testing.assert_array_equal(y, labels[part])
        np.testing.assert_array_equal(x[::7], images[part][::7].astype(np.float32) / np.float32(255))


@pytest.fixture
def damaged(tmp_path) -> Path:
    shutil.copytree(Path(PREPARED) / "mnist", tmp_path / "mnist")
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o755)
    return tmp_path


@needs_prepared_files
def test_a_truncated_file_is_an_error_that_says_what_to_remove(damaged):
    file = next(damaged.rglob("*test.tfrecord*"))
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size // 2)
    with pytest.raises(DataError, match=f"`{damaged}/mnist/3.0.1` is damaged") as caught:
        tfdist.data.load("mnist", damaged).arrays("test")
    assert "remove the folder" in caught.value.hint


@needs_prepared_files
def test_a_missing_file_is_an_error_that_says_what_to_remove(damaged):
    next(damaged.rglob("*test.tfrecord*")).unlink()
    with pytest.raises(DataError, match=f"`{damaged}/mnist/3.0.1` is damaged"):
        tfdist.data.load("mnist", damaged).arrays("test")


# TensorFlow Datasets: no files


def test_a_data_folder_that_does_not_exist_is_named_with_where_it_was_set(tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    with pytest.raises(DataError, match=f"the data folder `{missing}` does not exist"):
        tfdist.data.load("mnist", missing)
    monkeypatch.setenv("TFDS_DATA_DIR", str(missing))
    with pytest.raises(DataError, match=r"from TFDS_DATA_DIR, .* does not exist"):
        tfdist.data.load("mnist")
    assert not missing.exists()


def test_a_data_folder_that_is_a_file_or_cannot_be_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        tfds.data_folder(tmp_path / "file")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)  # root, who may run this test, can read everything
    with pytest.raises(DataError, match=r"cannot be read \(Permission denied\)"):
        tfds.data_folder(tmp_path)


def test_the_data_folder_is_the_argument_then_the_environment_then_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert tfds.data_folder(tmp_path.parent) == tmp_path.parent
    assert tfds.data_folder(None) == tmp_path
    monkeypatch.delenv("TFDS_DATA_DIR")
    assert tfds.data_folder(None) == tmp_path / "home" / "tensorflow_datasets"


@pytest.fixture
def no_network(monkeypatch) -> None:
    """Every name is unknown, and no proxy is set, in this process."""

    def refuse(*arguments, **options):
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_without_network_and_files_one_error_names_the_folder_and_what_to_do(name, tmp_path, no_network, capfd):
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        tfdist.data.load(name, tmp_path)
    assert time.monotonic() - began < 30
    assert f"`{name}` is not prepared in `{tmp_path}` and cannot be downloaded" in caught.value.sentence
    assert "no connection" in caught.value.sentence
    assert "`--data-dir`" in caught.value.hint and "`--dataset digits`" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().out == ""


def test_a_folder_that_cannot_be_written_is_an_error_before_the_network_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr(requests, "get", None)
    with pytest.raises(DataError, match=f"cannot be downloaded: `{tmp_path}` cannot be written"):
        tfdist.data.load("mnist", tmp_path)


@pytest.fixture
def silent_address() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"


def test_an_address_that_never_answers_is_given_up(silent_address, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(tfds, "ANSWER_SECONDS", 0.2)
    assert tfds.problem_with_address(silent_address) == "no answer in time"


def test_a_name_that_is_looked_up_forever_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds, "PROBE_SECONDS", 0.2)
    monkeypatch.setattr(tfds, "problem_with_address", lambda address: time.sleep(5))
    with pytest.raises(DataError, match=r"no answer within 0\.2 s"):
        tfdist.data.load("mnist", tmp_path)


def test_a_download_that_falls_silent_is_given_up(silent_address, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(tfds, "SILENCE_SECONDS", 0.2)
    with tfds.bounded_requests(), pytest.raises(requests.exceptions.RequestException):
        requests.get(silent_address)


# TensorFlow Datasets: a download. The server is ours, the way there is TensorFlow Datasets' own.

BUILDER = """
import sys
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.image_classification import mnist

import tfdist.data.formats.tfds

address, size, checksum, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
mnist._TRAIN_EXAMPLES, mnist._TEST_EXAMPLES = 30, 10


class TinyMnist(mnist.MNIST):
    URL = address
    known = UrlInfo(size=size, checksum=checksum, filename="t10k-images-idx3-ubyte.gz")
    url_infos = {address + known.filename: known}


builder = tfdist.data.formats.tfds.prepared(lambda: TinyMnist(data_dir=folder), folder)
print(builder.info.splits["train"].num_examples, builder.info.splits["test"].num_examples)
"""


def idx_files() -> dict[str, bytes]:
    files = {}
    for prefix, count in (("train", 30), ("t10k", 10)):
        pixels = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
        images = struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes()
        labels = struct.pack(">2i", 2049, count) + bytes(index % 10 for index in range(count))
        files[f"/{prefix}-images-idx3-ubyte.gz"] = gzip.compress(images)
        files[f"/{prefix}-labels-idx1-ubyte.gz"] = gzip.compress(labels)
    return files


@contextlib.contextmanager
def file_server(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serves `files`; gives the address and the list of paths asked for, as it grows."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a probe reads no further than the headers
                self.wfile.write(body or b"")

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/", asked
        server.shutdown()
        thread.join()


@pytest.mark.thorough
def test_of_two_processes_one_downloads_and_the_other_waits_for_it(tmp_path):
    files = idx_files()
    images = files["/t10k-images-idx3-ubyte.gz"]
    checksum = hashlib.sha256(images).hexdigest()
    with file_server(files) as (address, asked):
        command = [sys.executable, "-c", BUILDER, address, str(len(images)), checksum, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]
        outputs = [process.communicate(timeout=60) for process in processes]
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err
        assert out == "30 10\n"  # nothing of TensorFlow Datasets' own words
    # t10k-images, whose address is known, is asked for once more by each process that looks for a network.
    assert Counter(asked)["/train-images-idx3-ubyte.gz"] == 1
    assert Counter(asked)["/t10k-labels-idx1-ubyte.gz"] == 1
    assert json.loads(next(tmp_path.rglob("dataset_info.json")).read_text())["name"] == "tiny_mnist"


def test_a_download_that_is_refused_is_one_error(tmp_path):
    with file_server({}) as (address, _):
        result = run_python(BUILDER, address, "1", "0" * 64, str(tmp_path), NO_PROXY="127.0.0.1")
    assert result.returncode == 1
    assert "DataError: Dataset `tiny_mnist` is not prepared" in result.stderr
    assert "it answered 404 Not Found" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_download_that_fails_midway_is_one_error_and_leaves_nothing_that_looks_prepared(tmp_path):
    images = idx_files()["/t10k-images-idx3-ubyte.gz"]
    checksum = hashlib.sha256(images).hexdigest()
    with file_server({"/t10k-images-idx3-ubyte.gz": images}) as (address, _):
        arguments = (address, str(len(images)), checksum, str(tmp_path))
        result = run_python(BUILDER, *arguments, NO_PROXY="127.0.0.1")
    assert "DataError: Dataset `tiny_mnist` is not prepared" in result.stderr
    assert "cannot be downloaded: DownloadError: Failed to get url" in result.stderr
    assert not list(tmp_path.rglob("dataset_info.json"))
