"""The vocabulary of a job's sentences: the chief makes it, and all processes number their words by it."""

import json

import pytest

from tests.processes import jobs
from tfdist.data.formats import text

pytestmark = pytest.mark.thorough

# Notes by which vocabulary each process numbers its words, but for the one that fetches the data before there is a job.
DATASET = """
import sys
from tfdist.data.sources import sentences

def load(data_dir, *, vocabulary=None):
    if "tensorflow" in sys.modules:
        with open("asked.txt", "a") as file:
            file.write(f"{vocabulary}\\n")
    return sentences.load(data_dir, train="train.tsv", validation=None, test=None, vocabulary=vocabulary)
"""
WORDS = ["a", "good", "film", "with", "one", "fine", "actor", "who", "cannot", "save", "it"]
OPTIONS = ["--model", "nbow", "--epochs", "1", "--batch-size", "24", "--model-option", "embedding=8"]


def write_sentences(folder, words=tuple(WORDS)):
    """Eighty sentences of two classes."""
    folder.mkdir()
    lines = [f"{number % 2}\t{words[number % 11]} {words[number * 3 % 11]} film\n" for number in range(80)]
    (folder / "train.tsv").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(
    "strategy",
    ["multiworker", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("horovod", "mpi_split"))],
)
def test_the_chief_makes_the_vocabulary_and_the_other_process_is_told_it(tmp_path, strategy):
    if strategy != "multiworker":
        jobs.require_horovod()
    (tmp_path / "mine.py").write_text(DATASET)
    folder, run = write_sentences(tmp_path / "data"), tmp_path / "run"
    options = [*OPTIONS, "--dataset", "mine:load", "--data-dir", folder]
    with jobs.train(*options, run_dir=run, strategy=strategy) as job:
        code, out, err = job.end()
    assert code == 0, out + err
    made, told = sorted((tmp_path / "asked.txt").read_text().splitlines(), key=lambda line: line != "None")
    assert made == "None" and told.endswith("vocabulary.txt")
    words = text.read_vocabulary(run / "vocabulary.txt")
    assert words[:3] == ("<padding>", "<unknown>", "film") and set(words[2:]) == set(WORDS)
    assert text.read_vocabulary(tmp_path / told) == words
    assert json.loads((run / "run.json").read_text())["status"] == "completed"


def test_processes_whose_sentences_differ_are_refused_before_the_first_step(tmp_path):
    (tmp_path / "mine.py").write_text(DATASET)
    folders = write_sentences(tmp_path / "one"), write_sentences(tmp_path / "two", tuple(reversed(WORDS)))
    own = tuple(("--data-dir", folder) for folder in folders)
    options = (*OPTIONS, "--dataset", "sentences", "--data-option", "train=train.tsv")
    options += ("--data-option", "validation=none", "--data-option", "test=none")
    with jobs.by_hand(tmp_path / "run", *options, own=own) as processes:
        ends = [process.communicate(timeout=jobs.DEADLINE_SECONDS) for process in processes]
    for process, (_, err) in zip(processes, ends, strict=True):
        assert process.returncode != 0 and "the words of `train`" in err, err


def test_a_chief_whose_sentences_cannot_be_read_ends_the_job(tmp_path):
    run = tmp_path / "run"
    (tmp_path / "empty").mkdir()
    options = [*OPTIONS, "--dataset", "sentences", "--data-dir", tmp_path / "empty", "--timeout-seconds", "5"]
    with jobs.train(*options, "--data-option", "train=train.tsv", run_dir=run) as job:
        code, out, err = job.end()
        assert not job.left()
    assert code != 0 and "has no file `train.tsv`" in out + err
