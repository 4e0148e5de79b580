"""Traces of training steps, and what they say: the most expensive ops, and the wait for input.

A trace is written as TensorBoard's Profile plugin reads it:
`<log_dir>/plugins/profile/<time>/<host>.xplane.pb`.

Synopsis:

    with profiler.trace("logs"):
        for number in range(10):
            with profiler.step_marker(number):
                train_step()
    summary = profiler.summarize("logs")
    summary.input_share  # 0.02
    summary.ops[0]       # OpCost(name='.../conv2d/Conv2D', type='Conv2D', share=0.31, self_microseconds=...)

`python -m tfdist.profiling.trace LOG_DIR` prints the same as a table.

What xprof knows depends on the device. On a CPU, measured with TensorFlow 2.21 and xprof 2.24: overview page,
input pipeline, framework op stats, memory profile and trace viewer have figures; op profile, HLO stats and
roofline answer, but their trees are empty, because they are filled from a GPU's or TPU's own timeline, also
with XLA; memory viewer and graph viewer need a step compiled by XLA (`jit_compile=True`), whose ops are then
missing from framework op stats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.errors import RunFolderError, UsageError
from tfdist.profiling import breakdown, stages

_MARKER = "train"
# The op that waits for the next batch; the second is what a `for` loop over a dataset in a graph runs.
_WAITS_FOR_INPUT = ("IteratorGetNextOp::DoCompute", "IteratorGetNextAsOptionalOp::DoCompute")


@dataclass(frozen=True)
class OpCost:
    """The cost of one op in a trace.

    Attributes:
        name: its name in the graph, the same for all replicas.
        type: its TensorFlow type; `Dataset` for a stage of the input pipeline.
        share: its part of all ops' self time, 0 to 1.
        self_microseconds: time in the op itself, without the ops it calls, over the whole trace and all replicas.
    """

    name: str
    type: str
    share: float
    self_microseconds: float


@dataclass(frozen=True)
class Summary:
    """What a trace says.

    Attributes:
        ops: the most expensive ops, the dearest first. With a GPU those that ran there, else those of the
            CPU, the input pipeline's threads included.
        input_share: the part of a step that waited for input, 0 to 1, over all traced steps but the first; None where
            the trace holds no step markers.
        steps: the number of traced steps.
        step_seconds: their mean duration; tracing makes short steps longer.
        stages: what the stages of a pipeline do; None where there are none.
        breakdown: what a step is spent on, without the first one, and without the last one of three or more; None
            without markers of steps, and with a GPU, whose kernels are on time lines of their own.
    """

    ops: tuple[OpCost, ...]
    input_share: float | None
    steps: int
    step_seconds: float | None
    stages: stages.Busy | None = None
    breakdown: breakdown.Breakdown | None = None


def start(log_dir: str | os.PathLike[str]) -> None:
    """Starts a trace; one at a time in a process.

    Raises:
        UsageError: a trace is already running.
    """
    import tensorflow as tf

    try:
        tf.profiler.experimental.start(os.fspath(log_dir))
    except tf.errors.AlreadyExistsError:
        raise UsageError(
            f"A trace cannot be written to `{os.fspath(log_dir)}`: another one is running in this process",
            "profile with one tool at a time, and leave `profile_batch` of the TensorBoard callback at 0",
        ) from None


def stop() -> None:
    """Ends the trace and writes it."""
    import tensorflow as tf

    tf.profiler.experimental.stop()


def folder_of(log_dir: str | os.PathLike[str], run: str) -> Path:
    """Where the traces of one run are, a file a host."""
    return Path(log_dir, "plugins", "profile", run)


def put_beside(own_dir: str | os.PathLike[str], log_dir: str | os.PathLike[str], run: str, name: str) -> None:
    """Moves the traces below `own_dir` to those of the other processes below `log_dir`, as hosts of one run."""
    together = folder_of(log_dir, run)
    together.mkdir(parents=True, exist_ok=True)
    for path in Path(own_dir).glob("plugins/profile/*/*.xplane.pb"):
        host = path.name.removesuffix(".xplane.pb")
        shutil.move(path, together / f"{host}-{name}.xplane.pb")
    shutil.rmtree(own_dir)


@contextlib.contextmanager
def trace(log_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Traces what runs inside.

    Raises:
        UsageError: a trace is already running.
    """
    start(log_dir)
    try:
        yield
    finally:
        stop()


def step_marker(number: int) -> AbstractContextManager[Any]:
    """Marks what runs inside as training step `number`."""
    import tensorflow as tf

    return tf.profiler.experimental.Trace(_MARKER, step_num=number, _r=1)


def summarize(log_dir: str | os.PathLike[str], top: int | None = 10) -> Summary:
    """Reads the newest trace below `log_dir`, without TensorFlow.

    The wait for input is what the input pipeline analyzer finds. It finds no steps where the traced graph
    contains a `while` loop (it takes the loop's turns for steps); then the time that the steps spent in the
    ops that fetch the next batch is used.

    Args:
        log_dir: the folder that the trace was written to.
        top: how many ops to name; `None` names all.

    Raises:
        RunFolderError: there is no trace, or it cannot be read.
    """
    files = _newest_trace(Path(log_dir))
    with _aside(files) as links, _silent_stderr():
        table = _tool(links, "framework_op_stats")
        ops = _op_costs(table)
        events = [_events(file) for file in files]
        marked = [_marked_steps(one) for one in events]
        steps = _analyzed_steps(_tool(links, "input_pipeline_analyzer")) or [step for one in marked for step in one]
    if not ops and not steps:
        raise _unreadable(files, "it names no op and no step")
    # In the first one TensorFlow may still build a graph, beside which every wait is short.
    usual = steps[1:] or steps
    total, waiting = sum(step for step, _ in usual), sum(wait for _, wait in usual)
    return Summary(
        ops=tuple(ops[:top]),
        input_share=waiting / total if total else None,
        # xprof leaves out steps whose beginning or end it does not find in the threads of every replica.
        steps=max(map(len, marked)) or len(steps),
        step_seconds=total / len(usual) if usual else None,
        stages=_busy_stages(events),
        breakdown=None if _has_device(table) else _breakdown(events),
    )


def _busy_stages(events_of: Sequence[Sequence[Mapping[str, Any]]]) -> stages.Busy | None:
    """What the stages do in all traced steps but the first, in which TensorFlow may build a graph."""
    found = []
    for events in events_of:
        named = [(event.get("args", {}).get("long_name", ""), *_span(event)) for event in events]
        found.append(stages.busy(named, [_span(event) for event in events if _is_marker(event)][1:]))
    there = [one for one in found if one is not None]
    return stages.of_all(there) if there else None


def _breakdown(events_of: Sequence[Sequence[Mapping[str, Any]]]) -> breakdown.Breakdown | None:
    """What the traced steps between the first and the last are spent on, in the processes that mark their steps."""
    found = []
    for events in events_of:
        steps = [_span(event) for event in events if _is_marker(event)][1:]
        # A thread that is late in closing its last events loses them when the trace ends, and the last step with them.
        whole = steps[:-1] or steps
        found.append(breakdown.of_process(breakdown.operations_of(events), _fetches(events), whole))
    return breakdown.of_all([one for one in found if one is not None])


def _newest_trace(log_dir: Path) -> list[str]:
    """The newest trace's files, one for each machine."""
    files = sorted(log_dir.glob("**/plugins/profile/*/*.xplane.pb"))
    if not files:
        raise RunFolderError(
            f"No trace in `{log_dir}`: there is no `plugins/profile/*/*.xplane.pb` below it",
            "trace some steps first, with `--profile 10:20` or the `Profile` callback",
        )
    newest = max(files, key=lambda file: (file.parent.name, file.stat().st_mtime)).parent
    return [str(file) for file in files if file.parent == newest]


@contextlib.contextmanager
def _aside(files: Sequence[str]) -> Iterator[list[str]]:
    """Links to `files` in a folder of their own, where xprof may leave what it saves."""
    with tempfile.TemporaryDirectory(prefix="tfdist-profile-") as folder:
        links = [Path(folder, Path(file).name) for file in files]
        for link, file in zip(links, files, strict=True):
            link.symlink_to(Path(file).resolve())
        yield [str(link) for link in links]


def _tool(files: Sequence[str], name: str) -> Any:
    """What one of the Profile plugin's tools has to say about `files`, as parsed JSON."""
    from xprof.convert import raw_to_tool_data

    # Saved results would be left in the run's folder, and be read again after the files have changed.
    answer, _ = raw_to_tool_data.xspace_to_tool_data(files, name, {"use_saved_result": False})
    if not answer:
        raise _unreadable(files, f"xprof's `{name}` gives no answer")
    return json.loads(answer)


def _unreadable(files: Sequence[str], reason: str) -> RunFolderError:
    return RunFolderError(
        f"The trace `{Path(files[0]).resolve()}` cannot be read: {reason}",
        "trace again; a process that was killed while it wrote leaves an incomplete file",
    )


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a Google chart's table, by column."""
    columns = [column["id"] for column in table["cols"]]
    return [dict(zip(columns, (cell.get("v") for cell in row["c"]), strict=True)) for row in table.get("rows", [])]


def _op_costs(tables: Sequence[Mapping[str, Any]]) -> list[OpCost]:
    rows = [row for row in _rows(tables[0]) if row["type"] != "IDLE"]
    rows = [row for row in rows if _is_on_device(row)] or rows
    total = sum(row["total_self_time"] for row in rows)
    times: dict[tuple[str, str], float] = {}
    for row in rows:
        op = (_on_any_replica(row["operation"]), row["type"])
        times[op] = times.get(op, 0.0) + row["total_self_time"]
    costs = [OpCost(name, kind, time / total, time) for (name, kind), time in times.items() if time > 0]
    return sorted(costs, key=lambda cost: cost.self_microseconds, reverse=True)


def _has_device(tables: Sequence[Mapping[str, Any]]) -> bool:
    return any(_is_on_device(row) for row in _rows(tables[0]))


def _is_on_device(row: Mapping[str, Any]) -> bool:
    return bool(row["host_or_device"] == "Device" and row["type"] != "IDLE")


def _on_any_replica(operation: str) -> str:
    """The name of an operation without the replica that TensorFlow's strategies put into it."""
    without_scope = re.sub(r"(^|/)replica_\d+/", r"\1", operation)
    return re.sub(r"/update_\d+((?:_\d+)?/ResourceApply)", r"/update\1", without_scope)


def _analyzed_steps(tables: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Seconds of each step, and of its wait for input, as the input pipeline analyzer has them."""
    for table in tables:
        if {"stepTimeMs", "infeedTimeMs"} <= {column["id"] for column in table["cols"]}:
            return [(row["stepTimeMs"] / 1e3, row["infeedTimeMs"] / 1e3) for row in _rows(table)]
    return []


def _events(file: str) -> list[dict[str, Any]]:
    events = _tool([file], "trace_viewer")["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _marked_steps(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The same from the events of one machine: its step markers, and the fetching that overlaps them."""
    fetches = _fetches(events)
    steps = [_span(event) for event in events if _is_marker(event)]
    return [(end - begin, stages.covered(fetches, begin, end)) for begin, end in steps]


def _fetches(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [_span(event) for event in events if event["name"] in _WAITS_FOR_INPUT]


def _is_marker(event: Mapping[str, Any]) -> bool:
    return event["name"].split(" ")[0] == _MARKER and "step_num" in event.get("args", {})


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    """Begin and end in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keeps the dozens of lines that xprof's C++ writes for each question off the terminal."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def as_text(summary: Summary) -> str:
    """The summary as lines of text: a row for each op, whose name comes last and whole."""
    rows = [("share", "self time", "type", "op")]
    rows += [(f"{op.share:.1%}", f"{op.self_microseconds / 1e3:.2f} ms", op.type, op.name) for op in summary.ops]
    share, time, kind, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{s:>{share}}  {t:>{time}}  {k:<{kind}}  {name}" for s, t, k, name in rows]
    title = f"The {len(summary.ops)} most expensive ops of {summary.steps} steps, summed over replicas"
    waited = "" if summary.input_share is None else f"\n{summary.input_share:.1%} of a step waited for input"
    of_step = "" if summary.breakdown is None else "\n" + breakdown.as_text(summary.breakdown)
    of_stages = "" if summary.stages is None else "\n" + stages.as_text(summary.stages)
    return "\n".join([title, *lines]) + waited + of_step + of_stages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.profiling.trace", description="Print the most expensive operations of a trace."
    )
    parser.add_argument("log_dir", metavar="LOG_DIR", help="a folder with traces, such as that of a run")
    try:
        print(as_text(summarize(parser.parse_args().log_dir)))
    except RunFolderError as error:
        sys.exit(str(error))
