"""The timelines of several ranks as one; real ones are in tests/processes/test_horovod.py."""

import json
from pathlib import Path

import pytest

from tfdist.errors import UsageError
from tfdist.groups import horovod


def trace(start_micros):
    """As Horovod 0.28.1 writes it, of one tensor."""
    return [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": start_micros}},
        {"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "step.1"}},
        {"name": "process_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": 1}},
        {"ph": "B", "name": "ALLREDUCE", "ts": 10, "pid": 1},
        {"ph": "E", "ts": 30, "pid": 1},
    ]


def write(path, rank, events):
    horovod.begin_timeline(path, rank).write_text(json.dumps(events) if events else "")


def test_ranks_become_processes_and_tensors_threads_on_one_clock(tmp_path):
    path = tmp_path / "new" / "t.json"
    write(path, 1, trace(1500))
    write(path, 0, trace(1000))
    horovod.end_timeline(path, 1, 2)
    assert not path.exists()
    horovod.end_timeline(path, 0, 2)
    events = json.loads(path.read_text())
    named = [event for event in events if "name" in event.get("args", {})]
    names = [(event["name"], event["pid"], event["args"]["name"]) for event in named]
    assert names == [
        ("process_name", 0, "rank 0"),
        ("thread_name", 0, "step.1"),
        ("process_name", 1, "rank 1"),
        ("thread_name", 1, "step.1"),
    ]
    times = [(event["ph"], event["pid"], event["tid"], event["ts"]) for event in events if event["ph"] != "M"]
    assert times == [("B", 0, 1, 10), ("E", 0, 1, 30), ("B", 1, 1, 510), ("E", 1, 1, 530)]
    assert sorted(file.name for file in path.parent.iterdir()) == ["t.json", "t.rank-0.json", "t.rank-1.json"]


def test_ranks_that_write_nothing_or_elsewhere_are_left_out(tmp_path):
    path = tmp_path / "t.json"
    write(path, 0, trace(1000))
    write(path, 1, [])
    horovod.end_timeline(path, 1, 3)
    horovod.end_timeline(path, 0, 3)
    assert {event["pid"] for event in json.loads(path.read_text())} == {0}
    assert not horovod.timeline_of_rank(path, 1).exists()


def test_a_place_that_cannot_be_written_to_is_told():
    with pytest.raises(UsageError, match=r"cannot be written to `/dev/null/t\.json`"):
        horovod.begin_timeline(Path("/dev/null/t.json"), 0)
