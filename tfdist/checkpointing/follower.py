"""The checkpoints of a training that runs in other processes, each as soon as it is complete; imports no TensorFlow.

The training deletes its old checkpoints. Therefore a thread keeps each new one by a hard link, which costs no space,
until it was used. On file systems without hard links, a checkpoint that was deleted before its turn is left out.

Synopsis:

    >>> import tempfile
    >>> training, kept = (Path(tempfile.mkdtemp()) for _ in range(2))
    >>> follower = Follower(training, kept)
    >>> follower.next() is None
    True
    >>> path = (training / "step-00000040.ckpt").write_text("complete")
    >>> follower.next().name
    'step-00000040.ckpt'
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from tfdist.checkpointing.format import SUFFIX

LOOK_SECONDS = 0.2


class Follower:
    """Finds the checkpoints in a folder in the order of their steps.

    Args:
        folder: the folder of the checkpoints, which need not exist yet; they are renamed to their names when complete.
        kept: the folder for hard links to them; made if needed.
    """

    def __init__(self, folder: Path, kept: Path):
        self.folder = folder
        self._kept = kept
        self._seen: set[str] = set()
        self._waiting: list[Path] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._remove_kept()  # of an evaluator that was killed

    def start(self) -> Follower:
        """Looks for new checkpoints in a thread until `close`."""
        threading.Thread(target=self._look_until_closed, name="checkpoint follower", daemon=True).start()
        return self

    def next(self) -> Path | None:
        """The file of the earliest checkpoint that was not returned yet; `None` if there is no new one."""
        self._look()
        with self._lock:
            return self._waiting.pop(0) if self._waiting else None

    def release(self, path: Path) -> None:
        """Removes the hard link to a checkpoint that was used."""
        if path.parent == self._kept:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the thread, and removes the hard links that are left."""
        self._closed.set()
        with self._lock:
            self._remove_kept()

    def _look_until_closed(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        with self._lock:
            new = [path for path in self.folder.glob(f"step-*{SUFFIX}") if path.name not in self._seen]
            numbered = [path for path in new if path.stem.removeprefix("step-").isdigit()]
            for path in sorted(numbered, key=lambda path: int(path.stem.removeprefix("step-"))):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    self._waiting.append(self._keep(path))
                self._seen.add(path.name)

    def _keep(self, path: Path) -> Path:
        link = self._kept / path.name
        self._kept.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, link)
        except FileNotFoundError:
            raise
        except OSError:  # the file system has no hard links
            return path
        return link

    def _remove_kept(self) -> None:
        for path in self._kept.glob(f"step-*{SUFFIX}"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # missing, or not empty
            self._kept.rmdir()
