"""A profile of several processes: one run with a host for each rank, in the real TensorBoard."""

import json

import pytest

from tests.processes.jobs import train
from tests.test_profiler import serving


@pytest.mark.thorough
def test_all_ranks_are_hosts_of_one_run(tmp_path):
    run_dir = tmp_path / "run"
    with train("--epochs", "1", "--limit", "640", "--profile", "5:8", run_dir=run_dir) as job:
        code, _, err = job.end()
    assert code == 0, err
    (folder,) = (run_dir / "tensorboard" / "plugins" / "profile").iterdir()
    hosts = sorted(path.name.removesuffix(".xplane.pb") for path in folder.glob("*.xplane.pb"))
    assert len(hosts) == 2
    assert [host.rpartition("-rank-")[2] for host in hosts] == ["0", "1"]
    with serving(run_dir / "tensorboard") as tensorboard:
        run = tensorboard.wait_for_run(folder.name)
        found = json.loads(tensorboard.get("hosts", run=run, tag="trace_viewer@")[1])
        assert sorted(host["hostname"] for host in found) == hosts
        tables = tensorboard.tool(run, "overview_page", host=hosts[0])
        steps = next(table for table in tables if "stepTimeMs" in [column["id"] for column in table["cols"]])
        assert [row["c"][0]["v"] for row in steps["rows"]] == ["train 5", "train 6", "train 7"]


@pytest.mark.exhaustive
def test_the_servers_of_a_chief_are_hosts_of_its_run(tmp_path):
    run_dir = tmp_path / "run"
    options = ("--epochs", "1", "--limit", "640", "--ps", "1", "--profile", "5:8")
    with train(*options, strategy="parameter_server", run_dir=run_dir) as job:
        code, _, err = job.end()
    assert code == 0, err
    (folder,) = (run_dir / "tensorboard" / "plugins" / "profile").iterdir()
    hosts = sorted(path.name.removesuffix(".xplane.pb") for path in folder.glob("*.xplane.pb"))
    assert sorted("-".join(host.split("-")[-2:]) for host in hosts) == ["chief-0", "ps-0", "worker-0", "worker-1"]
    with serving(run_dir / "tensorboard") as tensorboard:
        run = tensorboard.wait_for_run(folder.name)
        found = json.loads(tensorboard.get("hosts", run=run, tag="trace_viewer@")[1])
        assert sorted(host["hostname"] for host in found) == hosts
    of_role = {"chief": b"", "worker": b"", "ps": b""}
    for host in hosts:
        of_role[host.split("-")[-2]] += (folder / f"{host}.xplane.pb").read_bytes()
    assert b"train" in of_role["chief"]  # the steps' markers
    assert b":SparseSoftmaxCrossEntropyWithLogits" in of_role["worker"]  # which computes
    assert b":ResourceApplyAdam" in of_role["ps"]  # which updates
    assert b":SparseSoftmaxCrossEntropyWithLogits" not in of_role["ps"]
