"""Finds, downloads and prepares the files of a TensorFlow Datasets (TFDS) dataset.

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
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from tfdist import files
from tfdist.errors import DataError

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
    with _lock(builder, folder):
        builder = make_builder()
        if not builder.is_prepared():
            _download_and_prepare(builder, folder)
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
    import tensorflow_datasets as tfds

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
    probe = threading.Thread(target=lambda: answers.append(_problem_with_address(addresses[0])), daemon=True)
    probe.start()
    probe.join(PROBE_SECONDS)
    problem = answers[0] if answers else f"no answer within {PROBE_SECONDS} s"
    if problem:
        raise _unavailable(builder, folder, f"`{urlsplit(addresses[0]).netloc}`: {problem}")


def _missing_downloads(builder: Any, folder: Path) -> list[str]:
    """The addresses from which TFDS will download; there are none if it has kept all downloads."""
    from tensorflow_datasets.core.download import resource

    def kept(address: str, checksum: str) -> bool:
        return (folder / "downloads" / resource.get_dl_fname(address, checksum)).exists()

    return [address for address, info in (builder.url_infos or {}).items() if not kept(address, info.checksum)]


def _problem_with_address(address: str) -> str:
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


def _download_and_prepare(builder: Any, folder: Path) -> None:
    import tensorflow_datasets as tfds

    # Do not look for prepared copies at a second address, which would have its own retries.
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    with _fetching(builder, folder):
        builder.download_and_prepare(download_dir=folder / "downloads", download_config=config)


@contextlib.contextmanager
def _fetching(builder: Any, folder: Path) -> Iterator[None]:
    """Limits each wait for the network, and turns every failure into one error."""
    import tensorflow_datasets as tfds

    tfds.disable_progress_bar()
    try:
        # TFDS prints to standard output, which is reserved for the command's table.
        with contextlib.redirect_stdout(sys.stderr), _bounded_requests():
            yield
    except Exception as error:  # TFDS passes on any kind of error: of the network, the disk or a checksum
        first_line = str(error).partition("\n")[0].rstrip(":")
        raise _unavailable(builder, folder, f"{type(error).__name__}: {first_line}") from error


@contextlib.contextmanager
def _bounded_requests() -> Iterator[None]:
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


def damaged(builder: Any, problem: str) -> DataError:
    """The error for prepared files that are incomplete."""
    folder = Path(builder.data_dir)
    return DataError(
        f"Dataset `{builder.name}` in `{folder}` is damaged: {problem}",
        f"remove the folder `{folder}`; the next start prepares it again",
    )
