"""The memory of every process of a long training stays as it is after the first tenth of its steps."""

import pytest

from tests.processes.jobs import epochs_done, train

EXAMPLES = 1000
EPOCHS = 40  # 20,000 steps


def memory(job):
    """The resident bytes of each process that runs the user's program."""
    found = {}
    for process in job.everyone():
        if "tfdist.launcher.script" in process.cmdline():
            found[process.pid] = process.memory_info().rss
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["multiworker", "parameter_server"])
def test_twenty_thousand_steps_leak_nothing(tmp_path, strategy):
    run_dir = tmp_path / "run"
    servers = ["--ps", "1"] if strategy == "parameter_server" else []
    # One epoch more, so that all processes are there when the last figures are taken.
    options = ["--limit", str(EXAMPLES), "--batch-size", "2", "--epochs", str(EPOCHS + 2)]
    with train(*options, *servers, run_dir=run_dir, strategy=strategy) as job:
        job.wait_for(lambda: epochs_done(run_dir) >= 4)
        before = memory(job)
        job.wait_for(lambda: epochs_done(run_dir) >= EPOCHS, seconds=900)
        after = memory(job)
    assert len(before) == 2 + 2 * len(servers) // 2
    growth = {pid: after[pid] / before[pid] - 1 for pid in before}
    assert max(growth.values()) < 0.03, growth
