"""What `run.json` says of the exchanges of a job, beside what its algorithm must send."""

import json

import pytest

from tests.processes.jobs import record, require_horovod, train

COUNTED = ("exchanges", "exchange_seconds", "sent_bytes", "received_bytes")
OPTIONS = ["--epochs", "2", "--quiet"]
STEPS = 43
# The transfers of all weights, or gradients, that a process takes part in during an epoch.
TRANSFERS = {
    "multiworker": ([], STEPS),
    "ring": (["--communication", "ring"], STEPS),
    "horovod": ([], STEPS),
    "local_sgd": (["--sync-every", "8"], STEPS // 8 + 1),
    "gossip": ([], STEPS + 1),  # the mean at the end of an epoch too
}
EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ring", "horovod", "local_sgd")]


def test_processes_of_gosgd_send_in_as_many_steps_as_their_probability_says(tmp_path):
    options = ["--strategy-option", "algorithm=gosgd", "--strategy-option", "probability=1"]
    with train("--epochs", "1", "--quiet", *options, run_dir=tmp_path / "run", strategy="gossip") as job:
        code, _, err = job.end()
    assert code == 0, err
    (epoch,) = record(tmp_path / "run")["epochs"]
    assert epoch["metrics"]["messages"] == 2 * STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["multiworker", "gossip", *EXHAUSTIVE])
def test_the_record_counts_what_the_processes_have_sent(tmp_path, name):
    if name == "horovod":
        require_horovod()
    options, transfers = TRANSFERS[name]
    strategy = {"ring": "multiworker"}.get(name, name)
    with train(*OPTIONS, *options, run_dir=tmp_path / "run", strategy=strategy) as job:
        code, _, err = job.end()
    assert code == 0, err
    found = record(tmp_path / "run")
    model_bytes, epoch = 4 * found["model"]["parameters"], found["epochs"][1]
    # The weights alone travel with `gossip`; with `local_sgd` Adam's two slots are averaged too.
    slots = 3 if name == "local_sgd" else 1
    for counted in ("sent_bytes", "received_bytes"):
        assert epoch[counted] == pytest.approx(2 * transfers * model_bytes * slots, rel=0.05)
    assert epoch["exchanges"] >= 2 * transfers
    assert 0 < epoch["exchange_seconds"] < 2 * (epoch["train_seconds"] + epoch["evaluation_seconds"])
    for number, process in enumerate(found["processes"]):
        assert all(process[name] > 0 for name in COUNTED), json.dumps(process)
        assert process["sent_bytes"] >= sum(one["sent_bytes"] for one in found["epochs"]) / 2, number
    rows = (tmp_path / "run" / "history.csv").read_text().splitlines()
    assert set(COUNTED) <= set(rows[0].split(","))
