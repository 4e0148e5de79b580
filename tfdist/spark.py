"""Runs a function in each process of a job on Spark: a stage in barrier mode, with a task for each process.

    def train(folder):
        strategy = tfdist.strategy("multiworker")
        ...
        columns = tfdist.spark.read_parquet(folder, ["features", "label"])
        model.fit(tfdist.data.per_process((columns["features"], columns["label"])), batch_size=32)
        return model.get_weights()

    frame.write.parquet("/shared/training")
    by_rank = tfdist.spark.run(train, args=("/shared/training",), workers=2)

Spark starts all tasks of such a stage at the same time. Each task tells the others the address of its process, and
starts it; a task does not compute in Spark's own Python process, which Spark uses again for other tasks.

Source: the documentation of Spark 4.1, `pyspark.BarrierTaskContext`, and SPARK-24374, which introduced barrier mode.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdist import extras
from tfdist.errors import ClusterError, DataError, TfdistError, UnknownNameError, UsageError
from tfdist.internals.spark import task_slots
from tfdist.jobs import job_environment, ports
from tfdist.jobs.world import World
from tfdist.launcher import call, lifetime
from tfdist.launcher import function as calls
from tfdist.options import checks_arguments

with extras.importing("spark", "`tfdist.spark`"):
    from py4j.protocol import Py4JJavaError
    from pyspark import BarrierTaskContext, SparkContext
    from pyspark.sql import SparkSession

# A task whose process has lost another one gives the task of that process time to fail first.
SECONDS_FOR_CAUSE = 3.0
# How long the executors have to register at the driver.
START_SECONDS = 60
# The beginning of a line in Spark's message about a failed stage.
_FAILED = "tfdist-failure: "


@checks_arguments
def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int | None = None,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` in each process of a job on Spark.

    Args:
        function: creates its strategy, and trains with it. Results, checkpoints and data must be on storage that all
            executors reach.
        args: its arguments, which are pickled.
        kwargs: its named arguments.
        workers: the number of processes, each of which takes a task slot of Spark; `None` for all slots.

    Returns:
        What the function returned, by rank.

    Raises:
        UsageError: the function cannot be sent to the executors, or raised such an error.
        ClusterError: there are fewer slots than processes, or a task failed, which is named.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"`workers` is {workers}", "use 1 or more, or leave it out for all task slots")
    pickled = calls.pickled(function, args, kwargs or {})
    context = SparkSession.builder.getOrCreate().sparkContext
    count = _slots(context, workers)
    variables = {
        job_environment.JOB: f"spark-{context.applicationId}",
        job_environment.SECRET: secrets.token_hex(32),
        job_environment.SHARE_CORES: "1",
        "PYTHONUNBUFFERED": "1",
    }
    stage = context.parallelize(range(count), count).barrier()
    try:
        return stage.mapPartitions(functools.partial(_task, pickled, variables)).collect()
    except Py4JJavaError as error:
        raise _named(str(error.java_exception)) from error


def _slots(context: SparkContext, wanted: int | None) -> int:
    """Waits until Spark can run `wanted` tasks at the same time, or any, and returns their number.

    Spark itself repeats its check of a barrier stage for ten minutes.
    """
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return wanted or context.defaultParallelism
    until = time.monotonic() + START_SECONDS
    while (slots := task_slots(context)) < (wanted or 1):
        if time.monotonic() > until:
            raise ClusterError(
                f"`workers` is {wanted}, and Spark has {slots} task slots after {START_SECONDS} s",
                "use fewer, or give the application more executors or cores; `spark.executor.cores` divided by "
                "`spark.task.cpus` is the number of slots of an executor",
            )
        time.sleep(0.2)
    return wanted or slots


def _task(pickled: bytes, variables: Mapping[str, str], _: Iterator[int]) -> Iterator[Any]:
    """Runs the process of this task; called by Spark in an executor."""
    context = BarrierTaskContext.get()
    rank = context.partitionId()
    with ports.hold() as reserved, tempfile.TemporaryDirectory(prefix="tfdist-spark-") as name:
        numbers = context.allGather(str(reserved.getsockname()[1]))
        hosts = [task.address.rpartition(":")[0] for task in context.getTaskInfos()]
        addresses = [f"{host}:{number}" for host, number in zip(hosts, numbers, strict=True)]
        environment = os.environ | variables | {ports.SHARE: "1"} | _gpus(context)
        environment[job_environment.TF_CONFIG] = json.dumps(
            {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        )
        folder = Path(name)
        calls.write_call(folder, pickled)
        end = _run(environment, rank, folder)
        outcome = calls.outcomes(folder, len(addresses))[rank]
    if outcome is None:
        outcome = calls.Outcome(error=f"worker {rank} ({addresses[rank]}) {end}")
    if outcome.error is None:
        yield outcome.value
        return
    if outcome.is_consequence:
        time.sleep(SECONDS_FOR_CAUSE)
    raise RuntimeError(f"{outcome.traceback}\n{_FAILED}{json.dumps([outcome.error, outcome.hint])}")


def _gpus(context: BarrierTaskContext) -> dict[str, str]:
    """The variables for the GPUs that Spark has assigned to the task."""
    gpus = context.resources().get("gpu")
    if gpus is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus.addresses), job_environment.OWN_GPUS: "1"}


def _run(environment: Mapping[str, str], rank: int, folder: Path) -> str:
    """Runs the process, writes its output into the executor's log, and returns how it ended, as part of a sentence."""
    command = [sys.executable, "-m", "tfdist.launcher.script", "-m", call.__name__, str(folder)]
    last_line = "no output"
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: lifetime.end_with_parent(signal.SIGKILL),  # noqa: PLW1509 - it calls one C function
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            last_line = line.decode(errors="replace").rstrip() or last_line
            print(f"[worker {rank}] {last_line}", file=sys.stderr, flush=True)
    code = child.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"{how}; its last line is: {last_line}"


def _named(message: str) -> TfdistError:
    """The error of the process that failed first, from Spark's message about the stage."""
    failure = re.search(rf"{_FAILED}(\[.*\])$", message, re.MULTILINE)
    if failure is not None:
        sentence, hint = json.loads(failure[1])
        return TfdistError(sentence, hint or "Spark's message above has the traceback")
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .*$", message, re.MULTILINE)  # of Python, in an executor
    reason = errors[-1] if errors else message.partition("\n")[0]
    hint = "Spark's message above and the executor's log have more about it"
    if reason.startswith("ModuleNotFoundError"):
        hint = "set `PYSPARK_PYTHON` to a Python of the executors that has the driver's packages"
    return ClusterError(f"The stage of the job failed: {reason}", hint)


def read_parquet(folder: str | os.PathLike[str], columns: Sequence[str]) -> dict[str, Any]:
    """The part of this process of a data frame that was saved with `frame.write.parquet(folder)`.

    The rows are divided in the order of the files: each process reads the next N-th part of them, and no others.

    Args:
        folder: the folder, on storage that all processes reach.
        columns: the names of the columns, which hold numbers, texts, bytes, dates, or arrays of numbers. Arrays in a
            column must have the same length in all rows.

    Returns:
        The columns as NumPy arrays, `[rows]` or `[rows, length]`, or with more dimensions for arrays of arrays.

    Raises:
        DataError: the folder has no such data frame, no rows, or values of which no array can be made.
        UnknownNameError: the data frame has no column of that name.
    """
    with extras.importing("spark", "`read_parquet`"):
        import pyarrow
        import pyarrow.dataset

    world = World.detect(os.environ)
    names = [columns] if isinstance(columns, str) else list(dict.fromkeys(columns))
    try:
        rows = pyarrow.dataset.dataset(os.fspath(folder), format="parquet", partitioning="hive")
        total = rows.count_rows()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(
            f"`{folder}` cannot be read as Parquet: {error}", "name a folder of `frame.write.parquet`"
        ) from error
    if not total:
        raise DataError(f"`{folder}` has no rows", "name a folder of `frame.write.parquet`, with at least one row")
    for name in names:
        if name not in rows.schema.names:
            raise UnknownNameError("column", name, rows.schema.names)
    first, end = (total * rank // world.world_size for rank in (world.rank, world.rank + 1))
    # A process without rows has arrays of the same shape as the others.
    table = _rows(rows, names, first, end) if first < end else rows.head(1, columns=names)
    return {name: _array(table[name].combine_chunks(), name)[: end - first] for name in names}


def _rows(dataset: Any, columns: Sequence[str], first: int, end: int) -> Any:
    """Rows `first` to `end` as a table; reads only the row groups that contain them."""
    with extras.importing("spark", "`read_parquet`"):
        import pyarrow

    tables, before = [], 0
    for fragment in dataset.get_fragments():
        for group in fragment.split_by_row_group():
            # `group.count_rows()` counts the rows of the whole file.
            count = sum(part.num_rows for part in group.row_groups)
            start, stop = max(first - before, 0), min(end - before, count)
            if start < stop:
                table = group.to_table(schema=dataset.schema, columns=list(columns))
                tables.append(table.slice(start, stop - start))
            before += count
    return pyarrow.concat_tables(tables)


def _array(column: Any, name: str) -> Any:
    """A column of a data frame as an array; its arrays become further dimensions."""
    import numpy as np

    with extras.importing("spark", "`read_parquet`"):
        from pyarrow import types

    if column.null_count:
        raise DataError(f"The column `{name}` has no value in {column.null_count} rows", "fill or drop them in Spark")
    if types.is_list(column.type):
        lengths = column.value_lengths().unique().to_pylist()
        if len(lengths) > 1:
            raise DataError(
                f"The column `{name}` has arrays of {min(lengths)} to {max(lengths)} values",
                "pad them in Spark to the same length",
            )
        values = _array(column.flatten(), name)
        return values.reshape(len(column), lengths[0], *values.shape[1:])
    if types.is_dictionary(column.type):  # the column of `partitionBy`
        column = column.dictionary_decode()
    if types.is_nested(column.type) or types.is_decimal(column.type):
        raise DataError(
            f"The column `{name}` has the type `{column.type}`", "convert it in Spark to numbers, or to arrays of them"
        )
    values = column.to_numpy(zero_copy_only=False)
    return values.astype(np.str_) if types.is_string(column.type) else values
