"""Each row of the matrix of faults ends in time, with the right exit codes and names, and leaves nothing behind.

`python -m tests.faults` runs the same rows, and shows them as a table.
"""

import pytest

from tests.faults import rows, running, table


def case(row):
    marks = [pytest.mark.independent, pytest.mark.thorough if row in rows.IN_CI else pytest.mark.exhaustive]
    return pytest.param(row, id=row.name, marks=marks)


@pytest.mark.parametrize("row", map(case, rows.ROWS))
def test_a_fault_ends_in_time_and_is_named(row):
    result = running.run(row)
    assert not result.problems, f"{table.line(result)}\n{table.output(result)}"
