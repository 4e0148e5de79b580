"""The folder with the checkpoints of one run, which only the chief reads and writes."""

from __future__ import annotations

from pathlib import Path

from tfdist.checkpointing import format as checkpoint_format
from tfdist.checkpointing import state
from tfdist.checkpointing.format import Entry, Header, Stored
from tfdist.errors import CheckpointError
from tfdist.interface import variables
from tfdist.jobs import consensus
from tfdist.jobs.consensus import Peers


class Store:
    """The checkpoints in `folder`.

    Args:
        folder: the folder of one run; made by the first write.
        keep: the number of checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self._keep = keep
        self._ahead: Stored | None = None

    def read_ahead(self) -> Stored | None:
        """Reads the newest intact checkpoint on the chief; the next call of `newest` does not read it again."""
        self._ahead = checkpoint_format.newest(self.folder)
        return self._ahead

    def newest(self, peers: Peers, within_epochs: bool) -> Stored | None:
        """Returns the chief's newest intact checkpoint in every process; the others need no access to its disk.

        The others get all values except those that are broadcast after `state.assign`.

        Args:
            peers: the processes of the job, all of which must call this method.
            within_epochs: whether a training can begin within an epoch; otherwise only ends of epochs count.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged, or none is from an epoch's end.
        """
        stored = self._newest(within_epochs) if peers.world.is_chief else None
        if peers.world.world_size == 1:
            return stored
        description = stored.described(without=state.is_shared) if stored else None
        description = consensus.broadcast_from_chief(peers, description)
        if description is None:
            return None
        stored = stored or checkpoint_format.described_by(description)
        for entry in stored.entries:
            if not state.is_shared(entry):
                variables.broadcast_array(entry.value, peers.broadcast)
        return stored

    def _newest(self, within_epochs: bool) -> Stored | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and (within_epochs or ahead.header.batch == 0):
            return ahead
        if within_epochs:
            return checkpoint_format.newest(self.folder)
        stored = checkpoint_format.newest(self.folder, lambda header: header.batch == 0)
        if stored is None and (paths := checkpoint_format.paths(self.folder)):
            raise CheckpointError(
                f"Keras' own `fit` and eager models cannot resume within an epoch, and `{self.folder}` contains no "
                f"checkpoint from an epoch's end; `{paths[0].name}` is the newest",
                "train with a strategy of tfdist, or delete the checkpoints to start from the beginning",
            )
        return stored

    def refuse_another_run(self) -> None:
        """Raises `CheckpointError` if the folder contains checkpoints, which a new run would replace."""
        if paths := checkpoint_format.paths(self.folder):
            raise CheckpointError(
                f"The folder `{self.folder}` already contains checkpoints, of which `{paths[0].name}` is the newest, "
                "and a new run would replace them",
                "resume it (`Checkpoint(..., resume=True)`, `--resume`), or use another folder",
            )

    def remove_unfinished(self) -> None:
        """Removes the temporary files of processes that were killed while writing."""
        checkpoint_format.remove_temporaries(self.folder)

    def write(self, header: Header, entries: list[Entry]) -> Path:
        """Writes a checkpoint, emptying `entries`, and removes the oldest checkpoints beyond the number to keep."""
        path = checkpoint_format.write(self.folder, header, entries)
        checkpoint_format.prune(self.folder, self._keep, path)
        return path
