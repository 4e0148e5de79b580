"""Workers and a centre: the published sequences, what is conserved, and when a rule is plain SGD."""

import doctest

import keras
import numpy as np
import pytest

from tfdist.relaxed import centre_rules
from tfdist.relaxed.centre_rules import Downpour, Eamsgd, Easgd, run_one_worker

RULES = [Downpour(1, 1), Downpour(3, 2), Downpour(2, 3), Easgd(1, 0.4), Easgd(3, 0.3), Eamsgd(2, 0.4, 0.9)]


def test_the_synopsis_runs():
    assert doctest.testmod(centre_rules).failed == 0


def test_elastic_averaging_is_that_of_the_paper_with_the_gradient_before_the_pull():
    """Gradient -1, rate 1, a = 1: at t = 2 the worker is at 2, goes on to 3, and is pulled back by 2."""
    own, centre = run_one_worker(Easgd(every=2, moving_rate=1.0), lambda x: x + 1, steps=7)
    assert own == [1, 2, 1, 2, 3, 4, 3]
    assert centre == [0, 0, 2, 2, 2, 2, 4]


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("moving_rate", [0.0, 0.25, 1.0])
def test_elastic_averaging_equals_the_published_loop(every, moving_rate):
    rate, x, centre = 0.1, np.array([1.0, -2.0]), np.array([0.5, 0.5])
    own, centres = run_one_worker(Easgd(every, moving_rate), lambda x: x - rate * x**3, 9, centre)
    x = centre
    for t in range(9):
        pulled = moving_rate * (x - centre) if t % every == 0 else 0.0
        centre = centre + pulled
        x = x - rate * x**3 - pulled
        np.testing.assert_allclose(own[t], x, rtol=1e-12)
        np.testing.assert_allclose(centres[t], centre, rtol=1e-12)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("moving_rate", [0.0, 0.25])
def test_elastic_averaging_with_momentum_equals_the_published_loop(every, moving_rate):
    rate, momentum, centre = 0.1, 0.9, np.array([0.5, -2.0])
    own, centres = run_one_worker(Eamsgd(every, moving_rate, momentum), lambda x: x - rate * x**3, 9, centre)
    x, v = centre, np.zeros(2)
    for t in range(9):
        pulled = moving_rate * (x - centre) if t % every == 0 else 0.0
        centre = centre + pulled
        v = momentum * v - rate * (x + momentum * v) ** 3
        x = x + v - pulled
        np.testing.assert_allclose(own[t], x + momentum * v, rtol=1e-12)
        np.testing.assert_allclose(centres[t], centre, rtol=1e-12)


def test_without_exchanges_the_momentum_is_that_of_nesterov_in_keras():
    own, _ = run_one_worker(Eamsgd(100, 0.0, 0.9), lambda x: x - 0.1 * 2 * x, 5, np.float32(1.0))
    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    for expected in own:
        optimizer.apply([2 * variable.value], [variable])
        assert float(variable) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("push_every", "fetch_every"), [(1, 1), (2, 2), (5, 5), (2, 3), (3, 2), (1, 7), (7, 1)])
def test_one_worker_of_downpour_does_the_steps_of_one_device(push_every, fetch_every):
    own, _ = run_one_worker(Downpour(push_every, fetch_every), lambda x: x - 0.1 * x**3, 20, np.array([1.0, -2.0]))
    x = np.array([1.0, -2.0])
    for found in own:
        x = x - 0.1 * x**3
        np.testing.assert_allclose(found, x, rtol=1e-12)


def together(rule, steps, workers=3, step=lambda worker, own: own, seed=0):
    """Runs workers in an order that is drawn; returns their weights, their memories and the centre, after each step."""
    random = np.random.default_rng(seed)
    centre, at = np.array([0.0, 1.0]), [None] * workers
    counts, seen = [0] * workers, []
    for number in range(workers):  # which start at different points
        own, memory = rule.begin(centre + number)
        at[number] = own, memory
    for _ in range(steps):
        worker = int(random.integers(workers))
        own, memory, centre = rule.exchanged(counts[worker], *rule.settle(*at[worker]), centre)
        own, memory = rule.stepped(step(worker, own), memory)
        at[worker] = rule.settle(own, memory)
        counts[worker] += 1
        seen.append(([own for own, _ in at], [memory for _, memory in at], centre))
    return seen


@pytest.mark.parametrize("rule", [Easgd(1, 0.4), Easgd(3, 0.3)])
def test_at_zero_gradients_the_sum_of_workers_and_centre_stays_and_they_meet(rule):
    seen = together(rule, 400)
    for owns, _, centre in seen:
        np.testing.assert_allclose(sum(owns) + centre, np.array([3.0, 7.0]), atol=1e-9)
    owns, _, centre = seen[-1]
    for own in owns:
        np.testing.assert_allclose(own, centre, atol=1e-6)


def test_what_workers_of_downpour_have_changed_comes_to_the_centre_once():
    rule = Downpour(3, 2)
    owns, memories, centre = together(rule, 100, step=lambda worker, own: own + 1.0 + worker, seed=4)[-1]
    counts = np.bincount(np.random.default_rng(4).integers(3, size=100), minlength=3)
    left = sum(rule.final_push(own, memory)[1] for own, memory in zip(owns, memories, strict=True))
    np.testing.assert_allclose(centre + left, np.array([0.0, 1.0]) + counts @ [1.0, 2.0, 3.0])


@pytest.mark.parametrize("rule", RULES)
def test_the_next_moment_is_never_missed(rule):
    """A worker that looks only at these moments does what one does that looks before every step."""
    every, settles = {exchange.every for exchange in rule.exchanges}, rule.settles_after
    moments = {
        t for t in range(40) for one in every if t % one == 0 or (settles is not None and t % one == settles % one)
    }
    t, seen = 0, set()
    while t < 40:
        seen.add(t)
        t += min(rule.until_next(t))
    assert seen == moments
