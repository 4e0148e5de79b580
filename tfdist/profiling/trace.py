"""Records and summarizes traces of training steps: the most expensive ops, and the wait for input.

A trace has the format of TensorBoard's Profile plugin: `<log_dir>/plugins/profile/<time>/<host>.xplane.pb`.

Synopsis:

    with profiler.trace("logs"):
        for number in range(10):
            with profiler.step_marker(number):
                train_step()
    summary = profiler.summarize("logs")
    summary.input_share  # 0.02
    summary.ops[0]       # OpCost(name='.../conv2d/Conv2D', type='Conv2D', share=0.31, self_microseconds=...)

`python -m tfdist.profiling.trace LOG_DIR` prints the same as a table.

Which of xprof's tools have data depends on the device. On a CPU, with TensorFlow 2.21 and xprof 2.24, the overview
page, input pipeline, framework op stats, memory profile and trace viewer have data. Op profile, HLO stats and roofline
are empty, also with XLA, because they need a GPU's or TPU's timeline. Memory viewer and graph viewer need a step that
is compiled by XLA (`jit_compile=True`), whose ops are then missing from framework op stats.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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

from tfdist import extras
from tfdist.errors import RunFolderError, UsageError
from tfdist.profiling import breakdown, stages
from tfdist.profiling.breakdown import OpCost

_MARKER = "train"
# The ops that wait for the next batch; the second one belongs to a `for` loop over a dataset in a graph.
_WAITS_FOR_INPUT = ("IteratorGetNextOp::DoCompute", "IteratorGetNextAsOptionalOp::DoCompute")


@dataclass(frozen=True)
class Summary:
    """The summary of a trace.

    Attributes:
        ops: the most expensive ops in descending order: the ops on the GPU if there is one, else those on the CPU,
            including the input pipeline's threads.
        input_share: the share of a step that waited for input, 0 to 1, over all traced steps but the first; `None` if
            the trace has no step markers.
        steps: the number of traced steps.
        step_seconds: the mean duration of a step; tracing makes short steps longer.
        stages: the computation times of a pipeline's stages; `None` if there is no pipeline.
        breakdown: the time of a step by activity, without the first step, and without the last one of three or more;
            `None` without step markers, and with a GPU, whose kernels are on separate timelines.
    """

    ops: tuple[OpCost, ...]
    input_share: float | None
    steps: int
    step_seconds: float | None
    stages: stages.Busy | None = None
    breakdown: breakdown.Breakdown | None = None


def start(log_dir: str | os.PathLike[str]) -> None:
    """Starts a trace; a process can record one at a time.

    Raises:
        UsageError: a trace is already running.
    """
    import tensorflow as tf

    try:
        tf.profiler.experimental.start(os.fspath(log_dir))
    except tf.errors.AlreadyExistsError:
        raise UsageError(
            f"A trace cannot be written to `{os.fspath(log_dir)}`: another trace is running in this process",
            "profile with one tool at a time, and leave `profile_batch` of the TensorBoard callback at 0",
        ) from None


def stop() -> None:
    """Ends the trace and writes it."""
    import tensorflow as tf

    tf.profiler.experimental.stop()


def folder_of(log_dir: str | os.PathLike[str], run: str) -> Path:
    """Returns the folder with the traces of a run, which has one file per host."""
    return Path(log_dir, "plugins", "profile", run)


def put_beside(local_dir: str | os.PathLike[str], log_dir: str | os.PathLike[str], run: str, name: str) -> None:
    """Moves the traces in `local_dir` to those of the other processes in `log_dir`, as hosts of one run."""
    folder = folder_of(log_dir, run)
    folder.mkdir(parents=True, exist_ok=True)
    for path in Path(local_dir).glob("plugins/profile/*/*.xplane.pb"):
        host = path.name.removesuffix(".xplane.pb")
        shutil.move(path, folder / f"{host}-{name}.xplane.pb")
    shutil.rmtree(local_dir)


@contextlib.contextmanager
def trace(log_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Traces the code within this context.

    Raises:
        UsageError: a trace is already running.
    """
    start(log_dir)
    try:
        yield
    finally:
        stop()


def step_marker(number: int) -> AbstractContextManager[Any]:
    """Marks the code within this context as training step `number`."""
    import tensorflow as tf

    return tf.profiler.experimental.Trace(_MARKER, step_num=number, _r=1)


def summarize(log_dir: str | os.PathLike[str], top: int | None = 10) -> Summary:
    """Summarizes the newest trace in `log_dir`, without TensorFlow.

    The wait for input comes from xprof's input pipeline analyzer. The analyzer finds no steps if the traced graph
    contains a `while` loop, whose iterations it takes for steps; then the time in the ops that fetch the next batch is
    used.

    Args:
        log_dir: the folder to which the trace was written.
        top: the number of ops to list; `None` lists all.

    Raises:
        RunFolderError: there is no trace, or it cannot be read.
    """
    files = _newest_trace(Path(log_dir))
    with _aside(files) as links, _silent_stderr():
        table = _tool(links, "framework_op_stats")
        ops = _op_costs(table)
        events = [_events(file) for file in files]
        marked = list(map(_marked_steps, events))
        steps = _analyzed_steps(_tool(links, "input_pipeline_analyzer")) or list(itertools.chain(*marked))
    if not ops and not steps:
        raise _unreadable(files, "it contains no op and no step")
    # In the first step TensorFlow may still trace a graph, compared to which every wait is short.
    usual = steps[1:] or steps
    total, waiting = sum(step for step, _ in usual), sum(wait for _, wait in usual)
    return Summary(
        ops=tuple(ops[:top]),
        input_share=waiting / total if total else None,
        # xprof omits steps whose begin or end it does not find in the threads of every replica.
        steps=max(map(len, marked)) or len(steps),
        step_seconds=total / len(usual) if usual else None,
        stages=_busy_stages(events),
        breakdown=None if any(map(_is_on_device, _rows(table[0]))) else _breakdown(events),
    )


def _busy_stages(events_of: Sequence[Sequence[Mapping[str, Any]]]) -> stages.Busy | None:
    """Summarizes the stages over all traced steps but the first, in which TensorFlow may trace a graph."""
    processes = [
        stages.busy(
            [(event.get("args", {}).get("long_name", ""), *_span(event)) for event in events], _steps(events)[1:]
        )
        for events in events_of
    ]
    known = [busy for busy in processes if busy is not None]
    return stages.of_all(known) if known else None


def _breakdown(events_of: Sequence[Sequence[Mapping[str, Any]]]) -> breakdown.Breakdown | None:
    """Breaks down the traced steps between the first and the last, over the processes that mark their steps."""
    processes = []
    for events in events_of:
        steps = _steps(events)[1:]
        # A thread that closes its last events late loses them when the trace ends, so the last step is incomplete.
        complete = steps[:-1] or steps
        process = breakdown.of_process(breakdown.operations_of(events), _fetches(events), complete)
        if process is not None:
            processes.append(process)
    return breakdown.of_all(processes)


def _newest_trace(log_dir: Path) -> list[str]:
    """Returns the newest trace's files, one per host."""
    files = sorted(file for file in log_dir.glob("**/plugins/profile/*/*.xplane.pb") if file.is_file())  # not a FIFO
    if not files:
        raise RunFolderError(
            f"No trace in `{log_dir}`: there is no `plugins/profile/*/*.xplane.pb` below it",
            "trace some steps first, with `--profile 10:20` or the `Profile` callback",
        )
    newest = max(files, key=lambda file: (file.parent.name, file.stat().st_mtime)).parent
    return [str(file) for file in files if file.parent == newest]


@contextlib.contextmanager
def _aside(files: Sequence[str]) -> Iterator[list[str]]:
    """Creates links to `files` in a temporary folder, in which xprof may save its results."""
    with tempfile.TemporaryDirectory(prefix="tfdist-profile-") as folder:
        links = [Path(folder, Path(file).name) for file in files]
        for link, file in zip(links, files, strict=True):
            link.symlink_to(Path(file).resolve())
        yield [str(link) for link in links]


def _tool(files: Sequence[str], name: str) -> Any:
    """Returns the output of one of the Profile plugin's tools for `files`, as parsed JSON."""
    with extras.importing("profile", "The summary of a trace"):
        from xprof.convert import raw_to_tool_data

    # Saved results would be read again after the files have changed.
    output, _ = raw_to_tool_data.xspace_to_tool_data(files, name, {"use_saved_result": False})
    if not output:
        raise _unreadable(files, f"xprof's `{name}` returns nothing")
    return json.loads(output)


def _unreadable(files: Sequence[str], reason: str) -> RunFolderError:
    return RunFolderError(
        f"The trace `{Path(files[0]).resolve()}` cannot be read: {reason}",
        "trace again; a process that was killed while it wrote leaves an incomplete file",
    )


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a Google chart's table, as dicts by column."""
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


def _is_on_device(row: Mapping[str, Any]) -> bool:
    return bool(row["host_or_device"] == "Device" and row["type"] != "IDLE")


def _on_any_replica(operation: str) -> str:
    """Returns the name of an operation without the replica number that TensorFlow's strategies put into it."""
    without_scope = re.sub(r"(^|/)replica_\d+/", r"\1", operation)
    return re.sub(r"/update_\d+((?:_\d+)?/ResourceApply)", r"/update\1", without_scope)


def _analyzed_steps(tables: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns the seconds of each step and of its wait for input, from the input pipeline analyzer."""
    for table in tables:
        if {"stepTimeMs", "infeedTimeMs"} <= {column["id"] for column in table["cols"]}:
            return [(row["stepTimeMs"] / 1e3, row["infeedTimeMs"] / 1e3) for row in _rows(table)]
    return []


def _events(file: str) -> list[dict[str, Any]]:
    events = _tool([file], "trace_viewer")["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _marked_steps(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns the same from the events of one host: its step markers, and the fetches that overlap them."""
    fetches = _fetches(events)
    return [(end - begin, stages.covered(fetches, begin, end)) for begin, end in _steps(events)]


def _fetches(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    return [_span(event) for event in events if event["name"] in _WAITS_FOR_INPUT]


def _steps(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    markers = (event for event in events if event["name"].split(" ")[0] == _MARKER)
    return [_span(event) for event in markers if "step_num" in event.get("args", {})]


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the begin and end in seconds."""
    return event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hides the dozens of lines that xprof's C++ code writes to stderr for each tool."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def as_text(summary: Summary) -> str:
    """Returns the summary as lines of text, with a row per op, whose name comes last and is not shortened."""
    rows = [("share", "self time", "type", "op")]
    rows += [(f"{op.share:.1%}", f"{op.self_microseconds / 1e3:.2f} ms", op.type, op.name) for op in summary.ops]
    share, time, kind, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = [f"{s:>{share}}  {t:>{time}}  {k:<{kind}}  {name}" for s, t, k, name in rows]
    title = f"The {len(summary.ops)} most expensive ops of {summary.steps} steps, on all replicas of this process"
    waited = "" if summary.input_share is None else f"\n{summary.input_share:.1%} of a step waited for input"
    step_text = "" if summary.breakdown is None else "\n" + breakdown.as_text(summary.breakdown)
    stages_text = "" if summary.stages is None else "\n" + stages.as_text(summary.stages)
    return "\n".join([title, *lines]) + waited + step_text + stages_text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.profiling.trace", description="Print the most expensive operations of a trace."
    )
    parser.add_argument("log_dir", metavar="LOG_DIR", help="a folder with traces, such as that of a run")
    try:
        print(as_text(summarize(parser.parse_args().log_dir)))
    except RunFolderError as error:
        sys.exit(str(error))
