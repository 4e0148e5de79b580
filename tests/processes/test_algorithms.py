"""The strategies of docs/algorithms.md train in two processes as the page says."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.processes.jobs import RunningJob, require_mpi

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent

USES = """
import sys, keras, numpy as np, tfdist
x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5]], "float32")

def trained(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    history = strategy.fit(model, x, y, batch_size=8, epochs=3, verbose=0).history
    return [history[name] for name in ("loss", "disagreement") if name in history], model.get_weights()

for name, options in (("mine:Gossip", {"sync_every": 1}), ("mine:Pipeline", {})):
    losses, weights = trained(tfdist.strategy(name, seed=1, **options))
    np.savez(sys.argv[1] + f"/{name[5:]}-{tfdist.strategy('mpi_split').world.rank}.npz", np.array(losses), *weights)
if tfdist.strategy("mpi_split").world.is_chief:
    losses, weights = trained(tfdist.strategy("single", seed=1))
    np.savez(sys.argv[1] + "/single-0.npz", np.array(losses), *weights)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each strategy has left in each process: the losses of the epochs, and the weights."""
    require_mpi()
    folder = tmp_path_factory.mktemp("algorithms")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    (folder / "mine.py").write_text("".join(blocks))
    (folder / "script.py").write_text(USES)
    with RunningJob("--mpi", "--workers", 2, "script.py", str(folder), cwd=folder) as job:
        code, _, err = job.end()
    assert code == 0, err
    return {path.stem: list(np.load(path).values()) for path in folder.glob("*.npz")}


def test_gossip_between_two_processes_trains_and_ends_with_the_same_weights(results):
    losses, disagreements = results["Gossip-0"][0]
    assert losses[-1] < losses[0]
    assert all(disagreements > 0)
    for mine, others in zip(results["Gossip-0"][1:], results["Gossip-1"][1:], strict=True):
        np.testing.assert_allclose(mine, others, rtol=1e-6)


def test_a_pipeline_of_two_stages_ends_with_the_weights_of_one_device(results):
    for rank in (0, 1):
        for weight, expected in zip(results[f"Pipeline-{rank}"][1:], results["single-0"][1:], strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)
