"""The real data sets that tests run on, where this machine has them; the repository holds none."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Plain files, a folder a dataset; and what TensorFlow Datasets prepared.
FILES = Path(os.environ.get("TFDIST_DATA") or ROOT.parent / "shared" / "data")
PREPARED = Path(os.environ.get("TFDS_DATA_DIR") or ROOT.parent / "shared" / "tfds")


def needs(*datasets: str) -> pytest.MarkDecorator:
    """Skips a test where a folder of plain files is missing."""
    missing = [name for name in datasets if not (FILES / name).is_dir()]
    return pytest.mark.skipif(
        bool(missing), reason=f"TFDIST_DATA does not name a folder with {', '.join(missing)} (looked in {FILES})"
    )
