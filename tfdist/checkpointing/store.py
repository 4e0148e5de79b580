"""The checkpoints of one run in its folder, which the chief alone reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing.format import Entry, Header, Stored
from tfdist.cluster.consensus import ProcessGroup
from tfdist.errors import CheckpointError


class Store:
    """The checkpoints in `folder`.

    Args:
        folder: of one run; made when something is written.
        keep: how many files stay, the newest.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self._keep = keep
        self._ahead: Stored | None = None

    def read_ahead(self) -> Stored | None:
        """The newest whole checkpoint, on the chief; the next `newest` need not read it again."""
        self._ahead = checkpoint_format.newest(self.folder)
        return self._ahead

    def newest(self, peers: ProcessGroup, within_epochs: bool) -> Stored | None:
        """The newest whole checkpoint that the chief finds, in every process: the others need not see its disk.

        Args:
            peers: the processes of the job, which all call it.
            within_epochs: a training can begin in the middle of an epoch; else only ends of epochs count.

        Raises:
            CheckpointError: there are checkpoints, and none of them is whole, or none of an epoch's end.
        """
        stored = self._newest(within_epochs) if peers.world.is_chief else None
        if peers.world.world_size == 1:
            return stored
        path = stored.header.path if stored is not None else None
        content = peers.exchange(path.read_bytes() if path is not None else b"")[0]
        return checkpoint_format.parse(self.folder / "of the chief", content) if content else None

    def _newest(self, within_epochs: bool) -> Stored | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (within_epochs or ahead.header.batch == 0):
            return ahead
        if within_epochs:
            return checkpoint_format.newest(self.folder)
        stored = checkpoint_format.newest(self.folder, lambda header: header.batch == 0)
        if stored is None and (found := checkpoint_format.paths(self.folder)):
            raise CheckpointError(
                f"Keras' own `fit`, and a model that runs eagerly, cannot resume within an epoch, and `{self.folder}` "
                f"holds no checkpoint of an epoch's end; `{found[0].name}` is the newest",
                "train with a strategy of tfdist, or delete the checkpoints to start from the beginning",
            )
        return stored

    def refuse_another_run(self) -> None:
        """Raises `CheckpointError` where the folder holds checkpoints, which a new run would replace."""
        if found := checkpoint_format.paths(self.folder):
            raise CheckpointError(
                f"The folder `{self.folder}` already holds checkpoints, `{found[0].name}` the newest, and a new run "
                "would replace them",
                "resume it (`Checkpoint(..., resume=True)`, `--resume`), or use another folder",
            )

    def remove_unfinished(self) -> None:
        """Removes what a process that was killed while it wrote has left."""
        checkpoint_format.remove_temporaries(self.folder)

    def write(self, header: Header, entries: Sequence[Entry]) -> Path:
        """Writes a checkpoint, and removes the oldest of those that are too many."""
        path = checkpoint_format.write(self.folder, header, entries)
        checkpoint_format.prune(self.folder, self._keep, path)
        return path
