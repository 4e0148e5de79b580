"""A collective that waits too long ends all of them; those that follow each other are let be."""

import contextlib
import time

import pytest
import tensorflow as tf

from tfdist.groups import CollectiveCounter
from tfdist.jobs.watchdog import Watch

SECONDS = 0.5


@pytest.fixture
def watched():
    """A counter of collectives, and the reasons for which a watch has ended them."""
    reasons, counter = [], CollectiveCounter()
    with contextlib.closing(Watch(SECONDS, counter.counts, reasons.append)):
        yield counter, reasons


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_collective_that_waits_too_long_is_ended_with_the_reason_and_once(watched):
    counter, reasons = watched

    def never():
        time.sleep(3 * SECONDS)
        return tf.constant(1.0)

    counter.around(never, [])
    assert reasons == ["a collective operation has waited 0.5 s for the other processes"]


def test_one_that_waits_in_a_graph_is_ended(watched):
    counter, reasons = watched

    def wait(value):
        until(lambda: reasons)
        return value

    @tf.function(autograph=False)
    def step(value):
        return counter.around(lambda: tf.numpy_function(wait, [value], tf.float32), [value])

    assert float(step(tf.constant(1.0))) == 1.0
    assert len(reasons) == 1


def test_steps_that_go_on_are_let_be_for_longer_than_one_may_wait(watched):
    counter, reasons = watched

    @tf.function(autograph=False)
    def steps(count):
        def step(done, value):
            value = tf.cond(done > 0, lambda: counter.around(lambda: value + 1.0, [value]), lambda: value)
            return done + 1, counter.around(lambda: value + 1.0, [value])

        return tf.while_loop(lambda done, _: done < count, step, [0, 0.0])[1]

    end = time.monotonic() + 3 * SECONDS
    while time.monotonic() < end:
        assert float(steps(tf.constant(10))) == 19.0
    assert reasons == []


def test_the_time_to_compute_what_is_sent_is_not_spent_waiting(watched):
    counter, reasons = watched

    def slow(value):
        time.sleep(3 * SECONDS)
        return value

    @tf.function(autograph=False)
    def step(value):
        value = tf.ensure_shape(tf.numpy_function(slow, [value], tf.float32), [])
        return counter.around(lambda: value + 1.0, [value])

    assert float(step(tf.constant(1.0))) == 2.0
    assert reasons == []
