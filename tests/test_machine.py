"""Figures of this machine: measured once, and again when what they depend on changes."""

import json

import pytest

from tfdist import machine


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tfdist" / "machine"


def test_a_figure_is_measured_once_per_machine_and_again_for_other_facts(cache, monkeypatch):
    values = iter([3.0, 4.0, 5.0])

    def measured(**facts):
        return machine.figure("speed", lambda: next(values), **facts)

    assert [measured(threads=1), measured(threads=1), measured(threads=2)] == [3.0, 3.0, 4.0]
    monkeypatch.setattr("platform.node", lambda: "another")  # a home folder that several hosts share
    assert measured(threads=1) == 5.0
    assert len(list(cache.glob("speed-*.json"))) == 3


def test_of_a_peak_the_highest_that_was_ever_measured_counts(cache):
    values = iter([3.0, 2.0, 4.0, 1.0])
    assert [machine.highest("peak", lambda: next(values)) for _ in range(4)] == [3.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize("content", ["", "{}", '{"value": null}', '{"value": "fast"}', '{"value": NaN}', "[" * 9000])
def test_a_file_that_holds_no_figure_is_replaced(cache, content):
    machine.figure("speed", lambda: 1.0)
    (path,) = cache.glob("speed-*.json")
    path.write_text(content)
    assert machine.figure("speed", lambda: 2.0) == 2.0
    assert json.loads(path.read_text())["value"] == 2.0


def test_a_cache_folder_that_cannot_be_written_only_costs_the_time_of_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine.figure("speed", lambda: 2.0) == 2.0
