"""`tfdist.spark.read_parquet` on files as Spark writes them."""

import json

import numpy as np
import pytest

from tfdist.errors import DataError, UnknownNameError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pytest.importorskip("pyspark", reason="PySpark is not installed: `pip install 'pyspark[sql]'`")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = 10


@pytest.fixture
def written(tmp_path):
    """Writes columns into a folder, and returns it."""

    def write(row_group_size=ROWS, **columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "part-00000.parquet", row_group_size=row_group_size)
        return tmp_path

    return write


@pytest.fixture
def read(monkeypatch):
    """What a process reads, by rank, of a job of several."""
    from tfdist import spark

    def read_in(processes, folder, columns):
        addresses = [f"localhost:{port}" for port in range(1, processes + 1)]
        by_rank = []
        for rank in range(processes):
            job = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            monkeypatch.setenv("TF_CONFIG", json.dumps(job))
            by_rank.append(spark.read_parquet(folder, columns))
        return by_rank

    return read_in


@pytest.mark.parametrize("row_group_size", [1, 3, 10])
@pytest.mark.parametrize("processes", [1, 2, 3, 12])
def test_every_row_is_read_by_one_process_in_order_whatever_the_row_groups(written, read, row_group_size, processes):
    x = np.arange(2.0 * ROWS).reshape(ROWS, 2)
    folder = written(row_group_size, x=x.tolist(), y=list(range(ROWS)))
    by_rank = read(processes, folder, ["x", "y"])
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in by_rank]), x)
    np.testing.assert_array_equal(np.concatenate([part["y"] for part in by_rank]), np.arange(ROWS))


def test_columns_have_the_types_that_spark_wrote(written, read):
    folder = written(texts=["ä", "bc"], bytes=[b"a\0", b""], matrices=[[[1.0, 2.0]], [[3.0, 4.0]]], flags=[True, False])
    for rank, part in enumerate(read(2, folder, ["texts", "bytes", "matrices", "flags"])):
        assert part["texts"].tolist() == [["ä"], ["bc"]][rank]
        assert part["bytes"].tolist() == [[b"a\0"], [b""]][rank]
        assert part["matrices"].shape == (1, 1, 2) and part["matrices"].dtype == "float64"
        assert part["flags"].dtype == bool


def test_the_column_of_a_partition_is_read(tmp_path, read):
    for value in (3, 4):
        folder = tmp_path / f"k={value}"
        folder.mkdir()
        parquet.write_table(pyarrow.table({"y": [value * 10]}), folder / "part-00000.parquet")
    assert [part["k"].tolist() for part in read(2, tmp_path, ["k", "y"])] == [[3], [4]]


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ([[1.0], [2.0, 3.0]], "The column `y` has arrays of 1 to 2 values"),
        ([[1.0], None], "The column `y` has no value in 1 rows"),
        ([1, None], "The column `y` has no value in 1 rows"),
        ([{"a": 1}, {"a": 2}], "The column `y` has the type `struct<a: int64>`"),
    ],
)
def test_values_of_which_no_array_can_be_made_are_refused_with_the_name_of_the_column(written, read, column, sentence):
    folder = written(y=column)
    with pytest.raises(DataError) as raised:
        read(1, folder, ["y"])
    assert raised.value.sentence == sentence


def test_wrong_folders_and_columns_are_refused_in_a_sentence(tmp_path, written, read):
    with pytest.raises(DataError, match="has no rows"):
        read(1, tmp_path, ["y"])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(1, tmp_path / "typo", ["y"])
    with pytest.raises(UnknownNameError, match="Unknown column `lable`"):
        read(1, written(label=[1]), ["lable"])


def test_a_package_that_the_executors_lack_is_an_error_that_names_the_variable_for_their_python():
    from tfdist import spark

    error = spark._named("Job aborted.\nModuleNotFoundError: No module named 'tfdist'\n")
    assert error.sentence.endswith("No module named 'tfdist'") and "`PYSPARK_PYTHON`" in error.hint
