"""Sources of TensorFlow Datasets (TFDS), whose files are downloaded and prepared if necessary.

Small pictures are in memory; large pictures are read record by record. Files are found in this order:

    prepared in the folder? ── yes ──> use it: no lock, no network, nothing written
      │ no
    can the folder be written, does the dataset's address answer? ── no ──> DataError, within 30 s
      │ yes
    take the lock ──> prepared by another process in the meantime? ── yes ──> use it
      │ no
    download and prepare, with a limit on each wait for the network
"""

from __future__ import annotations

import contextlib
import functools
import json
import lzma
import os
import struct
import sys
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import urlsplit

import numpy as np

from tfdist import extras, files
from tfdist.data.input import tfrecords
from tfdist.data.input.arrays import Arrays
from tfdist.data.input.pictures import PictureSource
from tfdist.data.input.source import Source
from tfdist.data.input.tfrecords import Records
from tfdist.data.spec import DataSpec
from tfdist.errors import DataError

if TYPE_CHECKING:
    import tensorflow as tf

FOLDER_VARIABLE = "TFDS_DATA_DIR"
DEFAULT_FOLDER = "~/tensorflow_datasets"

# With these limits, and the import of TensorFlow, a missing network is reported within 30 s.
CONNECT_SECONDS = 5
ANSWER_SECONDS = 10
PROBE_SECONDS = 15
# A download has failed if no byte arrives for this time.
SILENCE_SECONDS = 30
# Preparing takes about a minute; after this time the other process must be stuck.
LOCK_SECONDS = 900

# `in_memory` uses this many examples for validation: the last of TFDS' training split, in stored order.
VALIDATION_EXAMPLES = 5000

_DAMAGED_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError)
# How many examples are decoded together before they are copied into the result.
_CHUNK = 256


def data_folder(data_dir: str | PathLike[str] | None) -> Path:
    """The folder of prepared datasets: the argument, else TFDS_DATA_DIR, else TFDS' own default.

    Raises:
        DataError: the chosen folder does not exist, is a file, or cannot be read.
    """
    chosen, origin = data_dir, "the data folder"
    if not chosen:
        chosen, origin = os.environ.get(FOLDER_VARIABLE), f"the data folder, from {FOLDER_VARIABLE},"
    if not chosen:
        folder = Path(DEFAULT_FOLDER).expanduser()
        if not folder.exists():  # it is created when a dataset is downloaded
            return folder
        chosen, origin = folder, "the default data folder"
    folder = Path(chosen).expanduser().absolute()
    problem = _problem_with_folder(folder)
    if problem:
        raise DataError(
            f"Dataset files cannot be read: {origin} `{folder}` {problem}",
            "give an existing folder with `--data-dir`, or use `--dataset digits`, which needs no files",
        )
    return folder


def package() -> Any:
    """The module `tensorflow_datasets`.

    Raises:
        MissingPackageError: it is not installed.
    """
    with extras.importing("train", "A dataset of TensorFlow Datasets"):
        import tensorflow_datasets
    return tensorflow_datasets


def builder_of(name: str, data_dir: str | PathLike[str] | None, check: Callable[[Path], None] | None = None) -> Any:
    """The TFDS builder of a dataset; prepares the dataset if necessary.

    Args:
        name: the name in TFDS.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.
        check: called with the folder if the dataset is not prepared, before anything is downloaded.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded, or is damaged.
    """
    # The folder is checked first, because importing TensorFlow takes seconds.
    folder = data_folder(data_dir)
    tfds = package()

    def make() -> Any:
        return tfds.builder(name, data_dir=folder)

    if check is not None and not make().is_prepared():
        check(folder)
    return prepared(make, folder)


def prepared(make_builder: Callable[[], Any], folder: Path) -> Any:
    """A TFDS builder with prepared files; one process on this machine prepares them while the others wait.

    Args:
        make_builder: creates the `tfds.core.DatasetBuilder` for `folder`; called again after preparing, because a
            builder reads the files when it is created.
        folder: the result of `data_folder`.

    Raises:
        DataError: the files do not exist and cannot be prepared; the error names the folder.
    """
    builder = make_builder()
    if builder.is_prepared():
        return builder
    _check_writable(builder, folder)
    if builder.MANUAL_DOWNLOAD_INSTRUCTIONS is None:  # otherwise the user has to download the files
        _check_network(builder, folder)
    tfds = package()

    # Do not look for prepared copies at a second address, which would have its own retries.
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    with _lock(builder, folder):
        builder = make_builder()
        if not builder.is_prepared():
            with _fetching(builder, folder):
                builder.download_and_prepare(download_dir=folder / "downloads", download_config=config)
    return make_builder()


def extracted(builder: Any, folder: Path, addresses: Mapping[str, str]) -> dict[str, Path]:
    """The folders of unpacked archives by name; one process downloads them while the others wait.

    Args:
        builder: the builder of the dataset, which has the checksums.
        folder: the result of `data_folder`.
        addresses: the address of each archive, by name.

    Raises:
        DataError: the archives do not exist and cannot be downloaded.
    """
    tfds = package()

    done = folder / f"{builder.name}.json"  # written after all archives are unpacked
    if done.exists():
        return {name: folder / path for name, path in json.loads(done.read_text()).items()}
    _check_writable(builder, folder)
    _check_network(builder, folder)
    with _lock(builder, folder), _fetching(builder, folder):
        manager = tfds.download.DownloadManager(
            download_dir=folder / "downloads",
            extract_dir=folder / "downloads" / "extracted",
            dataset_name=builder.name,
            url_infos=builder.url_infos,
        )
        paths = {name: Path(path) for name, path in manager.download_and_extract(dict(addresses)).items()}
        files.write_text(done, json.dumps({name: str(path.relative_to(folder)) for name, path in paths.items()}))
    return paths


def in_memory(name: str, data_dir: str | PathLike[str] | None) -> Source:
    """A source of the TFDS dataset `name`, with the features "image" and "label", decoded once into memory.

    Reading the arrays initializes TensorFlow's devices: choose logical devices before.

    Args:
        name: the name in TFDS.
        data_dir: the folder of prepared datasets; see `tfdist.data.load`.

    Raises:
        DataError: the dataset is not prepared and cannot be downloaded, or is damaged.
    """
    builder = builder_of(name, data_dir)
    features, splits = builder.info.features, builder.info.splits
    label = features["label"]
    spec = DataSpec(
        name=builder.name,
        task="classification",
        input_shape=features["image"].shape,
        classes=label.num_classes,
        examples={
            "train": splits["train"].num_examples - VALIDATION_EXAMPLES,
            "validation": VALIDATION_EXAMPLES,
            "test": splits["test"].num_examples,
        },
        class_names=tuple(label.names),
    )
    return Source(spec, lambda split, count: _read(builder, split, count), divisor=255)


def by_record(
    builder: Any,
    test: str,
    size: Sequence[int],
    *,
    validation: float,
    target: str,
    classes: int,
    class_names: Sequence[str],
    first_label: int = 0,
    **options: Any,
) -> PictureSource:
    """A source of the pictures of a prepared dataset, which reads each example from its record; see `PictureSource`.

    Args:
        builder: the TFDS builder.
        test: the TFDS split for the test.
        size: height and width to which the pictures are resized.
        validation: the fraction of TFDS' training split, from its end, for validation; TFDS has shuffled the split.
        target: the feature of the label, or of the encoded mask for segmentation.
        first_label: the label of the first class in the files.
        **options: the options of `PictureSource`.
    """
    masks = target != "label"

    def of_split(split: str) -> Records:
        paths = tuple(Path(path) for path in builder.info.splits[split].filepaths)
        return Records(paths, tfrecords.index(paths), target, masks, first_label)

    train = of_split("train")
    first = len(train) - round(len(train) * validation)
    numbers = range(len(train))
    files = {"train": train.keep(numbers[:first]), "validation": train.keep(numbers[first:]), "test": of_split(test)}
    height, width = size
    spec = DataSpec(
        builder.name,
        "segmentation" if masks else "classification",
        (height, width, 3),
        classes,
        {},
        tuple(class_names),
        target_shape=(height, width) if masks else (),
    )
    return PictureSource(spec, files, **options)


def examples(builder: Any, split: str) -> Iterator[dict[str, Any]]:
    """The examples of a split or a part of a split, in stored order, as TFDS decodes them.

    Raises:
        DataError: the files are damaged.
    """
    with _damage_named(builder):
        yield from builder.as_dataset(split=split, shuffle_files=False).as_numpy_iterator()


def _read(builder: Any, split: str, count: int) -> Arrays:
    shape = builder.info.features["image"].shape
    x, y = np.empty((count, *shape), np.uint8), np.empty(count, np.int32)
    done = 0
    with _damage_named(builder):
        for images, labels in _batches(builder, split, count):
            end = done + len(labels)
            x[done:end], y[done:end] = images, labels
            done = end
    if done != count:
        raise _damaged(builder, f"`{split}` has {done} examples instead of {count}")
    return x, y


def _batches(builder: Any, split: str, count: int) -> Any:
    """Pairs of uint8 images `[b, H, W, C]` and int64 labels `[b]`, in stored order, decoded by all cores.

    TFDS itself parses one example after the other, which takes longer than decoding.
    """
    import tensorflow as tf

    shape = builder.info.features["image"].shape
    size = struct.pack(">II", shape[1], shape[0])
    stored_as = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}

    def decode_image(image: tf.Tensor) -> tf.Tensor:
        return tf.io.decode_png(image, channels=shape[-1])

    def decode(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples = tf.io.parse_example(records, stored_as)
        # The header of a PNG file begins with its size; a picture of another size may be too large for the memory.
        sizes = tf.strings.substr(examples["image"], 16, len(size))
        tf.debugging.assert_equal(sizes, size, f"a picture does not have {shape[1]} x {shape[0]} pixels")
        pixels = tf.map_fn(decode_image, examples["image"], fn_output_signature=tf.TensorSpec(shape, tf.uint8))
        return pixels, examples["label"]

    stored = {"validation": f"train[-{VALIDATION_EXAMPLES}:]"}.get(split, f"{split}[:{count}]")
    files = builder.info.splits[stored].file_instructions
    parts = [tf.data.TFRecordDataset(file.filename).skip(file.skip).take(file.take) for file in files]
    records = functools.reduce(tf.data.Dataset.concatenate, parts).batch(_CHUNK)
    return records.map(decode, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2).as_numpy_iterator()


@contextlib.contextmanager
def _damage_named(builder: Any) -> Iterator[None]:
    import tensorflow as tf

    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        raise _damaged(builder, str(error).partition("\n")[0]) from error


def _problem_with_folder(folder: Path) -> str:
    try:
        if not folder.exists():
            return "does not exist"
        if not folder.is_dir():
            return "is not a folder"
        next(folder.iterdir(), None)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def _check_writable(builder: Any, folder: Path) -> None:
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _unavailable(builder, folder, f"`{existing}` cannot be written")


def _check_network(builder: Any, folder: Path) -> None:
    """Sends one short request to the dataset's address, because TFDS itself would retry for minutes."""
    addresses = _missing_downloads(builder, folder)
    if not addresses:
        return
    answers: list[str] = []
    # In a thread, because looking up a host name has no timeout; a daemon thread, because it may not end in time.
    probe = threading.Thread(target=lambda: answers.append(problem_with_address(addresses[0])), daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    problem = answers[0] if answers else f"no answer within {PROBE_SECONDS} s"
    if problem:
        raise _unavailable(builder, folder, f"`{urlsplit(addresses[0]).netloc}`: {problem}")


def _missing_downloads(builder: Any, folder: Path) -> list[str]:
    """The addresses from which TFDS will download; there are none if it has kept all downloads."""
    with extras.importing("train", "A dataset of TensorFlow Datasets"):
        from tensorflow_datasets.core.download import resource

    def kept(address: str, checksum: str) -> bool:
        return (folder / "downloads" / resource.get_dl_fname(address, checksum)).exists()

    return [address for address, info in (builder.url_infos or {}).items() if not kept(address, info.checksum)]


def problem_with_address(address: str) -> str:
    """Why `address` cannot be downloaded, in a few words; empty if it can."""
    import requests

    try:
        with requests.get(address, stream=True, timeout=(CONNECT_SECONDS, ANSWER_SECONDS)) as response:
            return "" if response.ok else f"it answered {response.status_code} {response.reason}"
    except requests.exceptions.ProxyError:
        return "the proxy cannot be reached or refused"
    except requests.exceptions.Timeout:
        return "no answer in time"
    except requests.exceptions.RequestException:
        return "no connection"


@contextlib.contextmanager
def _lock(builder: Any, folder: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{builder.name}.lock", timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        reason = f"another process has been preparing it for {LOCK_SECONDS // 60} minutes"
        raise _unavailable(builder, folder, reason) from error


@contextlib.contextmanager
def _fetching(builder: Any, folder: Path) -> Iterator[None]:
    """Limits each wait for the network, and turns every failure into one error."""
    tfds = package()

    tfds.disable_progress_bar()
    try:
        # TFDS prints to standard output, which is reserved for the command's table.
        with contextlib.redirect_stdout(sys.stderr), bounded_requests():
            yield
    except _DAMAGED_ARCHIVE as error:
        reason = str(error).partition("\n")[0].rstrip(":")
        raise DataError(
            f"Dataset `{builder.name}` cannot be prepared: an archive in `{folder / 'downloads'}` is incomplete or "
            f"damaged: {reason}",
            "compare the sizes of the archives with those at their source, and download the damaged one again",
        ) from error
    except Exception as error:  # TFDS passes on any kind of error: of the network, the disk or a checksum
        first_line = str(error).partition("\n")[0].rstrip(":")
        raise _unavailable(builder, folder, f"{type(error).__name__}: {first_line}") from error


@contextlib.contextmanager
def bounded_requests() -> Iterator[None]:
    """Limits waits and retries; TFDS itself has no timeout, and tries eleven times."""
    from requests.adapters import HTTPAdapter

    send = HTTPAdapter.send

    def bounded(self: HTTPAdapter, request: Any, *arguments: Any, **options: Any) -> Any:
        options["timeout"] = options.get("timeout") or (CONNECT_SECONDS, SILENCE_SECONDS)
        self.max_retries = self.max_retries.new(total=2)
        return send(self, request, *arguments, **options)

    with mock.patch.object(HTTPAdapter, "send", bounded):
        yield


def _unavailable(builder: Any, folder: Path, reason: str) -> DataError:
    return DataError(
        f"Dataset `{builder.name}` is not prepared in `{folder}` and cannot be downloaded: {reason}",
        f"give a folder that has it with `--data-dir` (or {FOLDER_VARIABLE}), connect to the network, "
        "or use `--dataset digits`, which needs no files",
    )


def _damaged(builder: Any, problem: str) -> DataError:
    """The error for prepared files that are incomplete."""
    folder = Path(builder.data_dir)
    return DataError(
        f"Dataset `{builder.name}` in `{folder}` is damaged: {problem}",
        f"remove the folder `{folder}`; the next start prepares it again",
    )
