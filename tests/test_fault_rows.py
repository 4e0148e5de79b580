"""The rows of the matrix of faults are consistent, and a result that differs from its row is reported."""

import dataclasses

import pytest

from tests.faults import rows, running, table

ROW = rows.Row("multiworker", "worker 1", "SIGKILL", "training", named="worker 1", faulty_exits=(rows.KILLED,))
LOST = "error: Gone: worker 1 (localhost:1001)\n\nhint: see its output"
AS_PROMISED = running.Result(ROW, 2.0, {"worker 0": 3, "worker 1": -9}, output={"worker 0": LOST, "worker 1": ""})


def test_each_row_has_a_name_of_its_own_and_a_known_fault_and_moment():
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS) >= 100
    assert {row.fault for row in rows.ROWS} == set(rows.FAULTS)
    assert {row.moment for row in rows.ROWS} == set(rows.MOMENTS)
    assert {row.role for row in rows.ROWS} == {"worker 0", "worker 1", "chief 0", "ps 0", "launcher"}
    assert len({row.engine for row in rows.IN_CI}) == len({row.engine for row in rows.ROWS})


def test_a_row_passes_that_ends_as_it_says():
    assert list(running.differences(ROW, AS_PROMISED)) == []
    assert running.named_in(ROW, AS_PROMISED) == ["worker 1"]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"exits": {"worker 0": None, "worker 1": -9}}, "worker 0 has not ended instead of 3"),
        ({"exits": {"worker 0": 1, "worker 1": -9}}, "worker 0 ended with 1 instead of 3"),
        ({"seconds": 21.5}, "not within 21 s"),
        ({"output": {"worker 0": "error: Gone", "worker 1": ""}}, "worker 0 does not say `worker 1`"),
        ({"output": {"worker 0": f"Traceback {LOST}", "worker 1": ""}}, "worker 0 prints a traceback"),
        ({"left": ["process 17"]}, "left: process 17"),
    ],
)
def test_what_differs_from_the_row_is_reported(changed, problem):
    assert list(running.differences(ROW, dataclasses.replace(AS_PROMISED, **changed))) == [problem]


def test_the_table_has_a_line_for_each_row():
    failed = dataclasses.replace(AS_PROMISED, problems=["not within 21 s"])
    text = table.markdown([AS_PROMISED, failed, running.Result(ROW, skipped="no `ip`")])
    assert "| `multiworker` | worker 1 | SIGKILL | training | 2.0 | worker 0: 3, worker 1: -9 |" in text
    assert text.rstrip().endswith("3 rows: 1 as promised, 1 failed, 1 skipped")
