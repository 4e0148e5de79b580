"""What is simulated is what real processes do: the same weights, where an algorithm is deterministic."""

import pytest

from tests.processes.test_local_sgd import of_two

SCRIPT = """
import sys
import keras, numpy as np, tfdist
from tfdist.advisor.costs import Link
from tfdist.data.input import adapters
from tfdist.simulator import simulation
from tfdist.simulator.links import Links
from tfdist.simulator.replicas import Replicas
from tfdist.simulator.simulation import Settings

CASES = [
    ("local_sgd", {"sync_every": 2}, "average", {"sync_every": 2}),
    ("local_sgd", {"outer": "slowmo", "sync_every": 2}, "slowmo", {"sync_every": 2}),
    ("local_sgd", {"outer": "diloco", "sync_every": 2}, "diloco", {"sync_every": 2}),
    ("local_sgd", {"outer": "easgd", "sync_every": 2}, "easgd", {"sync_every": 2}),
    ("gossip", {}, "dpsgd", {}),
    ("gossip", {"algorithm": "sgp"}, "sgp", {}),
]
x = np.random.default_rng(0).normal(size=(45, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")


def made():
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    model.optimizer.build(model.trainable_variables)
    return model


for name, options, algorithm, own in CASES:
    strategy = tfdist.strategy(name, seed=1, **options)
    with strategy.scope():
        model = made()
    strategy.fit(model, x, y, batch_size=12, epochs=2, verbose=0)
    feed = adapters.make(adapters.request(x, y, batch_size=12, shuffle=True), strategy.seed)
    steps, links = Replicas(made(), feed, 2), Links.of(2, Link(1e-3, 1e6))
    simulated = simulation.make_algorithm(steps, Settings(algorithm, (1.0, 0.4), 0.01, links, **own))
    for _ in range(2):
        simulated.run(steps.steps_per_epoch)
    weights, _ = simulated.global_model()
    found = np.concatenate([one.reshape(-1) for one in model.get_weights()])
    with open(f"{sys.argv[1]}/said", "a") as file:
        file.write(f"{algorithm} {abs(found - weights).max()}\\n")
"""


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return of_two(SCRIPT, tmp_path_factory.mktemp("simulated"))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["average", "slowmo", "diloco", "easgd", "dpsgd", "sgp"])
def test_the_simulator_ends_with_the_weights_of_two_processes(differences, algorithm):
    assert len(differences[algorithm]) == 2
    assert all(float(one) < 2e-6 for one in differences[algorithm])
