"""After a signal to a job or to a process, the user sees one line, with a way to go on that works."""

import signal
import time

import pytest

from tests.processes.jobs import by_hand, epochs_done, record, train, wait_for_epochs

ENDS = {signal.SIGTERM: "Ended by SIGTERM", signal.SIGHUP: "Ended by SIGHUP", signal.SIGINT: "Interrupted"}
LONG = ("--epochs", "100000")


def said(output):
    """The lines of a job about its end, without the progress of its training."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("While the job runs")]
    return [line for line in lines if "network namespace" not in line]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.thorough) for n in (signal.SIGHUP, signal.SIGINT))]
)
def test_a_signal_to_a_job_is_named_in_one_line_that_says_how_to_continue(tmp_path, number):
    run_dir = tmp_path / "run"
    with train(*LONG, run_dir=run_dir) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 2)
        began = time.monotonic()
        job.signal(number)
        code, _, err = job.end()
        assert time.monotonic() - began < 10
        assert job.left() == []
    assert code == 128 + number
    assert said(err) == [f"{ENDS[number]}; continue with `python -m tfdist.train --resume --run-dir {run_dir}`"]
    for log in (run_dir / "output").iterdir():
        assert "error:" not in log.read_text()
    assert "--resume" not in (run_dir / "output" / "worker-1.log").read_text()
    assert record(run_dir)["status"] == "interrupted"


@pytest.mark.thorough
def test_before_the_first_checkpoint_the_line_says_how_to_start_over(tmp_path):
    run_dir = tmp_path / "run"
    data = ("--dataset", "synthetic", "--data-option", "train=1000000", "--data-option", "shape=(4, 4, 1)")
    with train(*LONG, *data, run_dir=run_dir) as job:
        job.wait_for((run_dir / "run.json").exists)
        job.signal(signal.SIGTERM)
        code, _, err = job.end()
    assert code == 128 + signal.SIGTERM
    assert not list((run_dir / "checkpoints").glob("*.ckpt"))
    command = f"python -m tfdist.train --resume --run-dir {run_dir}"
    assert said(err) == [f"Ended by SIGTERM before the first checkpoint; start over with `{command}`"]


@pytest.mark.thorough
def test_a_signal_to_one_process_started_by_hand_is_named_there_and_the_loss_elsewhere(tmp_path):
    run_dir = tmp_path / "run"
    with by_hand(run_dir, *LONG, "--timeout-seconds", "10") as processes:
        wait_for_epochs(run_dir, 2, processes)
        processes[1].send_signal(signal.SIGTERM)
        _, of_worker = processes[1].communicate(timeout=60)
        _, of_chief = processes[0].communicate(timeout=60)
    assert processes[1].returncode == 128 + signal.SIGTERM
    assert "--resume" not in of_worker and "error:" not in of_worker
    assert processes[0].returncode == 3
    assert "worker 1" in of_chief
