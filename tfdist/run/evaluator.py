"""When the evaluator of `tfdist train` ends: it knows the training only by the run folder, which both share."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tfdist.checkpointing.evaluation import History, no_checkpoint
from tfdist.errors import ClusterError
from tfdist.jobs.job_environment import EVALUATOR_SECONDS
from tfdist.jobs.rendezvous import start_timeout_seconds
from tfdist.options import checked_seconds
from tfdist.run.folder import RunFolder, load_record

ENDED_WELL = ("completed", "stopped")


class Training:
    """The training that an evaluator follows, as `run.json` describes it.

    Args:
        folder: the folder of the evaluator.
        history: the results of the evaluator.
        resumed: whether the record may be that of the training that is resumed.
    """

    def __init__(self, folder: RunFolder, history: History, resumed: bool):
        self._path = folder.run_json
        self._checkpoints = folder.run_dir / folder.checkpoints.name
        self._history = history
        # The processes meet within the first half, and then read their data and build the model.
        self._begin_seconds = 2 * start_timeout_seconds(None)
        self._seconds = checked_seconds(EVALUATOR_SECONDS, os.environ.get(EVALUATOR_SECONDS, "3600"))
        self._earlier = _changed(self._path) if resumed else None
        self._change, self._changed_at = self._earlier, time.monotonic()

    def ended(self, waited: float) -> bool:
        """Whether no further checkpoint will come.

        Args:
            waited: the seconds since the last checkpoint, or since the start.

        Raises:
            ClusterError: the training has failed and was not restarted, it has not begun, or it seems to be dead.
        """
        if _changed(self._path) != self._change:
            self._change, self._changed_at = _changed(self._path), time.monotonic()
        unchanged = time.monotonic() - self._changed_at
        if self._change is None:
            return self._not_begun(unchanged)
        record = load_record(self._path.parent)
        if record.status == "running":
            if min(waited, unchanged) > self._seconds:
                raise no_checkpoint(self._checkpoints, waited, self._history)
            return False
        if record.status in ENDED_WELL and self._change != self._earlier:
            return True
        # A job that has failed may be restarted, and a job that is resumed has not begun.
        if unchanged <= self._begin_seconds:
            return False
        if record.status in ENDED_WELL:
            return True
        raise ClusterError(
            f"The training has ended as `{record.status}`, and was not restarted within {unchanged:,.0f} s: "
            f"{record.reason}",
            f"its checkpoints are evaluated in `{self._history.path}`; resume all processes with `--resume`",
        )

    def _not_begun(self, waited: float) -> bool:
        if waited <= self._begin_seconds:
            return False
        raise ClusterError(
            f"The evaluator has waited {waited:,.0f} s, and there is no run in `{self._path.parent}`",
            "start the chief and the workers with the same `--run-dir`, on a file system that the evaluator shares "
            "with the chief; if they start later, set TFDIST_START_SECONDS, half of the time to wait",
        )


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
