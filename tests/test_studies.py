"""The studies that come with the project can be made."""

from pathlib import Path

import pytest

from tfdist.study import plan

STUDIES = sorted((Path(__file__).parent.parent / "studies").glob("*.toml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_a_study_names_what_there_is(file):
    from tfdist import data, models

    study = plan.Plan(**plan.read(file))
    assert set(study.models) <= set(models.names())
    assert set(study.datasets) <= set(data.names())
    assert len(study.cells()) > 1
