"""Decentralised training as state machines: what is conserved, and what the published rules give."""

import doctest
import itertools

import numpy as np
import pytest

from tfdist.errors import UnknownNameError, UsageError
from tfdist.relaxed import gossip_rules, topologies
from tfdist.relaxed.gossip_rules import AdPsgd, DPsgd, GoSgd, PushSum

SIZES = [1, 2, 3, 4, 6, 7]


def test_the_synopses_run():
    assert doctest.testmod(gossip_rules).failed == doctest.testmod(topologies).failed == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", topologies.NAMES)
def test_a_topology_is_doubly_stochastic_and_connects_all(name, size):
    found = topologies.matrix(name, size)
    np.testing.assert_allclose(found.sum(axis=0), 1)
    np.testing.assert_allclose(found.sum(axis=1), 1)
    np.testing.assert_array_equal(topologies.matrix(found.tolist(), size), found)  # which is also checked as a user's


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([[1.0]], "`topology` is 1 x 1, and the job has 2 processes"),
        ([[0.5, 0.5], [0.6, 0.4]], "not doubly stochastic: column 0 sums to 1.1"),
        ([[0.5, 0.3], [0.5, 0.6]], "not doubly stochastic: row 0 sums to 0.8"),
        ([[1.5, -0.5], [-0.5, 1.5]], "weights that are below zero"),
        ([[1.0, 0.0], [0.0, 1.0]], "is not connected"),
        ("rings", "Unknown topology `rings`"),
        ([["a", "b"]], "no matrix"),
    ],
)
def test_a_matrix_that_cannot_work_is_refused(given, told):
    with pytest.raises(UsageError, match="hint") as refused:
        topologies.matrix(given, 2)
    assert told in str(refused.value)
    assert isinstance(refused.value, UnknownNameError) == isinstance(given, str)


def run(machines, weights, steps, step=lambda rank, weights: weights, order=None):
    """Runs all machines; messages wait in a list, and asynchronous ones come late, in an order that is drawn."""
    random = np.random.default_rng(0)
    flying = []

    def send(rank, messages):
        flying.extend((to, rank, np.array(message)) for to, message in messages)

    def deliver(to, all_of_them):
        for one in [one for one in flying if one[0] == to and (all_of_them or random.random() < 0.5)]:
            flying[:] = [other for other in flying if other is not one]
            machines[to].receive(*one[1:])

    for _ in range(steps):
        for rank, machine in enumerate(machines):
            send(rank, machine.begin(weights[rank]))
        for rank, machine in enumerate(machines):
            weights[rank] = step(rank, weights[rank])
            send(rank, machine.stepped(weights[rank]))
        for rank, machine in enumerate(machines):
            deliver(rank, all_of_them=bool(machine.expected))
            weights[rank], messages = machine.finish(weights[rank])
            send(rank, messages)
    return weights, flying


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", topologies.NAMES)
def test_dpsgd_is_the_mixed_weights_and_the_step(name, size):
    mixing = topologies.matrix(name, size)
    at = np.random.default_rng(1).normal(size=(size, 3))

    def gradient(rank, weights):
        return weights * (rank + 1) - rank

    expected = at.copy()
    for _ in range(5):
        steps = np.array([gradient(rank, one) for rank, one in enumerate(expected)])
        expected = mixing @ expected - 0.1 * steps
    found, flying = run(
        [DPsgd(rank, mixing) for rank in range(size)],
        list(at),
        5,
        lambda rank, weights: weights - 0.1 * gradient(rank, weights),
    )
    np.testing.assert_allclose(found, expected)
    assert not flying


@pytest.mark.parametrize("size", SIZES)
def test_push_sum_conserves_its_weights_and_comes_to_the_mean(size):
    at = np.random.default_rng(1).normal(size=(size, 3))
    machines = [PushSum(rank, size) for rank in range(size)]
    found, _ = run(machines, list(at), 40)
    assert sum(machine.mass for machine in machines) == pytest.approx(size)
    np.testing.assert_allclose(found, np.tile(at.mean(axis=0), (size, 1)), atol=1e-8)


@pytest.mark.parametrize("size", SIZES)
def test_push_sum_that_is_resumed_pushes_to_whom_an_unbroken_run_pushes(size):
    def pushes(machine):
        machine.begin(np.ones(3))
        return [to for to, _ in machine.stepped(np.ones(3))]

    for rank in range(size):
        unbroken = PushSum(rank, size)
        expected = [pushes(unbroken) for _ in range(8)]
        for step in range(8):
            resumed = PushSum(rank, size)
            resumed.resume_at(step)
            assert pushes(resumed) == expected[step]


@pytest.mark.parametrize("size", SIZES)
def test_gosgd_conserves_masses_and_the_weighted_sum_with_messages_in_flight(size):
    at = np.random.default_rng(1).normal(size=(size, 3))
    machines = [GoSgd(rank, size, 0.4, seed=5) for rank in range(size)]
    found, flying = run(machines, list(at), 60)
    assert sum(one.mass for one in machines) + sum(message[-1] for *_, message in flying) == pytest.approx(1)
    total = sum(one.mass * weights for one, weights in zip(machines, found, strict=True))
    total = total + sum(message[-1] * message[:-1] for *_, message in flying)
    np.testing.assert_allclose(total, at.mean(axis=0))
    assert size == 1 or np.ptp(found, axis=0).max() < np.ptp(at, axis=0).max()


@pytest.mark.parametrize("size", SIZES)
def test_adpsgd_keeps_the_sum_and_shrinks_the_distance(size):
    at = np.random.default_rng(1).normal(size=(size, 3))
    mixing = topologies.matrix("ring", size)
    machines = [AdPsgd(rank, mixing, seed=5) for rank in range(size)]
    found, flying = run(machines, list(at), 1000)
    for _ in range(20):  # what is in flight arrives, and no one asks again
        for to, from_, message in flying:
            machines[to].receive(from_, message)
        flying = []
        for rank, machine in enumerate(machines):
            found[rank], messages = machine.finish(found[rank])
            flying += [(to, rank, message) for to, message in messages]
    assert not any(machine.awaits_reply for machine in machines)
    np.testing.assert_allclose(np.mean(found, axis=0), at.mean(axis=0))
    assert np.std(found, axis=0).max() <= 1e-3 * np.std(at, axis=0).max() + 1e-12


def test_one_worker_alone_is_sgd():
    mixing = topologies.matrix("full", 1)
    for machine in (DPsgd(0, mixing), PushSum(0, 1), GoSgd(0, 1, 1.0, 0), AdPsgd(0, mixing, 0)):
        (found,), flying = run([machine], [np.array([3.0])], 4, lambda rank, weights: weights - 0.5)
        assert found == pytest.approx(1.0) and not flying


@pytest.mark.parametrize("name", gossip_rules.OPTIONS)
def test_weights_and_messages_keep_their_dtype(name):
    mixing = topologies.matrix("full", 2)
    machines = [gossip_rules.machine(name, rank, mixing, 1.0, seed=0) for rank in range(2)]
    found, flying = run(machines, [np.zeros(3, np.float32), np.ones(3, np.float32)], 5)
    assert {one.dtype for one in found} == {np.dtype("float32")}
    assert {message.dtype for *_, message in flying} <= {np.dtype("float32")}


def test_a_machine_of_the_same_seed_sends_the_same():
    def sent(seed):
        machine = GoSgd(0, 4, 0.5, seed)
        return list(itertools.chain.from_iterable([to for to, _ in machine.stepped(np.zeros(1))] for _ in range(30)))

    assert sent(1) == sent(1) != sent(2)
