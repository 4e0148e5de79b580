"""The studies that come with the project can be made: by `tfdist compare`, or by the simulator."""

import tomllib
from pathlib import Path

import pytest

from tfdist.simulator import matrix
from tfdist.study import plan

STUDIES = sorted((Path(__file__).parent.parent / "studies").glob("*.toml"))


def _simulated(file):
    return "algorithms" in tomllib.loads(file.read_text())


@pytest.mark.parametrize("file", [file for file in STUDIES if not _simulated(file)], ids=lambda file: file.stem)
def test_a_comparison_names_what_there_is(file):
    from tfdist import data, models

    study = plan.Plan(**plan.read(file))
    assert set(study.models) <= set(models.names())
    assert set(study.datasets) <= set(data.names())
    assert len(study.cells()) > 1


@pytest.mark.parametrize("file", [file for file in STUDIES if _simulated(file)], ids=lambda file: file.stem)
def test_a_simulated_study_names_what_there_is(file):
    from tfdist import data, models

    study = matrix.read(file)
    assert {case.model for case in study.cases} <= set(models.names())
    assert {case.dataset for case in study.cases} <= set(data.names())
    assert len(list(matrix.runs(study))) > 1
