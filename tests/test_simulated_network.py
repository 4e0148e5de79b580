"""Simulated transfers share links: what an epoch takes is compared with arithmetic that is written down here."""

import doctest
import functools
import heapq

import numpy as np
import pytest

from tests.test_simulator import replicas
from tfdist.advisor.costs import Link
from tfdist.errors import UsageError
from tfdist.relaxed.topologies import matrix
from tfdist.simulator import links, network, simulation, state
from tfdist.simulator.links import CENTRE, Links
from tfdist.simulator.simulation import Settings

STEPS = 4  # global batches per epoch, see tests/test_simulator.py
BYTES = 4 * 31  # of the weights, and of the gradient
STEP = 0.010  # seconds
LATENCY = 0.001  # seconds of a message between two machines
PASS = 0.005  # seconds in which the weights pass a link that they do not share
RATE = BYTES / PASS
ROUNDS = 2 * (4 - 1)  # of a ring all-reduce of 4 workers
SPEEDS = (1.0, 0.91, 0.57, 0.26)

replicas_of = functools.cache(replicas)  # steps do not change them


def run(algorithm, workers, *settings, speeds=None, **options):
    """An epoch of the algorithm."""
    every = Links.of(workers, Link(LATENCY, RATE), settings)
    arguments = Settings(algorithm, speeds or (1.0,) * workers, STEP, every, **options)
    found = simulation.make_algorithm(replicas_of(workers), arguments)
    found.run(STEPS)
    return found


def times(factor):
    """A rate for `--link`."""
    return f"{8 * RATE * factor:.0f}bit/s"


def handed_out(parts, seconds):
    """When all `parts` are done, if each goes to the worker that is free first."""
    free = [(0.0, rank) for rank in range(len(seconds))]
    ends = []
    for _ in range(parts):
        at, rank = heapq.heappop(free)
        ends.append(at + seconds[rank])
        heapq.heappush(free, (ends[-1], rank))
    return max(ends)


# The arguments of `run`, and the seconds of the epoch.
STAR = {
    "equal links": (("bsp", 4), {}, STEPS * (LATENCY + 4 * PASS + STEP + LATENCY + 4 * PASS)),
    "fast centre": (("bsp", 4, f"centre={times(10)}"), {}, STEPS * (LATENCY + PASS + STEP + LATENCY + PASS)),
    "slow downlink of the centre": (
        ("bsp", 4, f"centre.down={times(0.5)}"),
        {},
        STEPS * (LATENCY + 4 * PASS + STEP + LATENCY + 8 * PASS),
    ),
    "worker behind a slow link": (
        ("bsp", 4, f"3={times(0.1)}"),
        {},
        STEPS * (LATENCY + 10 * PASS + STEP + LATENCY + 10 * PASS),
    ),
    "worker far away": (
        ("bsp", 4, f"centre={times(10)}", f"2.up={times(1)},50ms"),
        {},
        STEPS * (LATENCY + PASS + STEP + 0.050 + LATENCY / 2 + PASS),
    ),
    "asynchronous": (("asp", 4), {}, STEPS * (LATENCY + 4 * PASS + STEP + LATENCY + 4 * PASS)),
    "asynchronous, unequal speeds": (
        ("asp", 4, "1000000Gbit/s,0s"),
        {"speeds": SPEEDS},
        handed_out(4 * STEPS, [STEP / speed for speed in SPEEDS]),
    ),
    "exchanges before each step": (  # and a push at the end
        ("downpour", 4),
        {"sync_every": 1},
        STEPS * (LATENCY + 4 * PASS + LATENCY + 4 * PASS + STEP) + LATENCY + 4 * PASS,
    ),
    "exchanges before every second step": (
        ("aeasgd", 4),
        {"sync_every": 2},
        STEPS / 2 * (LATENCY + 4 * PASS + LATENCY + 4 * PASS) + STEPS * STEP,
    ),
}
RING = {
    "all-reduce": (("allreduce", 4), {}, STEPS * (STEP + ROUNDS * (LATENCY + PASS / 4))),
    "all-reduce, slow uplink": (
        ("allreduce", 4, f"1.up={times(0.1)}"),
        {},
        STEPS * (STEP + ROUNDS * (LATENCY + 10 * PASS / 4)),
    ),
    "all-reduce over a switch": (  # which four messages of a round share
        ("allreduce", 4, f"switch={times(1)},3ms"),
        {},
        STEPS * (STEP + ROUNDS * (LATENCY + 0.003 + PASS)),
    ),
    "all-reduce of weights and momentum": (
        ("average", 4),
        {"sync_every": 2},
        STEPS * STEP + STEPS / 2 * ROUNDS * (LATENCY + 2 * PASS / 4),
    ),
    "neighbours": (("dpsgd", 8), {}, STEPS * (STEP + LATENCY + 2 * PASS)),
    "neighbours of a slow worker": (  # which never waits for them
        ("dpsgd", 4),
        {"speeds": (0.25, 1.0, 1.0, 1.0)},
        STEPS * 4 * STEP + LATENCY + 2 * PASS,
    ),
    "pair that averages during steps": (("adpsgd", 2), {}, STEPS * max(STEP, 2 * (LATENCY + PASS))),
}
FULL = {
    "equal links": (("dpsgd", 8), {"topology": "full"}, STEPS * (STEP + LATENCY + 7 * PASS)),
    "over a switch": (  # which 56 messages share
        ("dpsgd", 8, f"switch={times(4)}"),
        {"topology": "full"},
        STEPS * (STEP + LATENCY + 56 / 4 * PASS),
    ),
}
TREE = {
    "equal links": (("dpsgd", 7), {"topology": "tree"}, STEPS * (STEP + LATENCY + 3 * PASS)),
    "fast root": (("dpsgd", 7, f"0={times(9)}"), {"topology": "tree"}, STEPS * (STEP + LATENCY + 3 * PASS)),
    "over a switch": (  # which 12 messages share
        ("dpsgd", 7, f"switch={times(2)}"),
        {"topology": "tree"},
        STEPS * (STEP + LATENCY + 12 / 2 * PASS),
    ),
}
CASES = {
    f"{shape}: {name}": case
    for shape, cases in {"star": STAR, "ring": RING, "full": FULL, "tree": TREE}.items()
    for name, case in cases.items()
}


def test_the_synopses_run():
    assert not any(doctest.testmod(module).failed for module in (links, network, state))


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_takes_what_arithmetic_gives(name):
    arguments, options, seconds = CASES[name]
    assert run(*arguments, **options).clock.now == pytest.approx(seconds, rel=1e-6)


def test_more_messages_take_longer_where_they_share_links():
    ring, full = run("dpsgd", 8), run("dpsgd", 8, topology="full")
    assert full.sent_bytes == 3.5 * ring.sent_bytes
    assert full.clock.now - STEPS * (STEP + LATENCY) == pytest.approx(3.5 * (ring.clock.now - STEPS * (STEP + LATENCY)))


def test_rates_are_max_min_fair():
    """Each message has a full link on which no other message is faster, which defines the max-min fair rates."""
    random = np.random.default_rng(0)
    for _ in range(20):
        capacities = random.uniform(1, 10, 9)
        paths = np.stack([random.integers(0, 4, 12), random.integers(4, 8, 12), np.full(12, 8)], axis=1)
        rates = network.fair_rates(paths, capacities)
        loads = np.bincount(paths.ravel(), weights=np.repeat(rates, 3), minlength=9)
        assert (loads <= capacities * (1 + 1e-9)).all() and (rates > 0).all()
        for path, rate in zip(paths, rates, strict=True):
            full = [link for link in path if loads[link] >= capacities[link] * (1 - 1e-9)]
            assert any(rate >= rates[(paths == link).any(axis=1)].max() * (1 - 1e-9) for link in full)


def test_messages_of_different_times_share_a_link_while_both_pass_it():
    """The first has passed 100 of 300 bytes when the second begins, and the second half of its 200 when it ends."""
    clock, arrivals = simulation.algorithms.Clock(), {}
    net = network.Network(clock, Links.of(2, Link(0.0, 100.0)))
    net.send(CENTRE, 0, 300, lambda: arrivals.setdefault("first", clock.now))
    clock.after(1.0, lambda: net.send(CENTRE, 1, 200, lambda: arrivals.setdefault("second", clock.now)))
    clock.run()
    assert arrivals == {"first": pytest.approx(5.0), "second": pytest.approx(5.0)}


def test_later_settings_override_earlier_ones_and_keep_what_they_leave_out():
    found = Links.of(3, Link(1e-3, 1e6), ["80Mbit/s,2ms", "workers.up=8Mbit", "1.up=16Mbit/s,4ms", "centre=1Gbit/s"])
    assert found.up == (Link(2e-3, 1e6), Link(4e-3, 2e6), Link(2e-3, 1e6), Link(2e-3, 125e6))
    assert found.down[:3] == (Link(2e-3, 10e6),) * 3 and found.switch is None


@pytest.mark.parametrize(
    "setting",
    ["fast", "4=1Gbit/s", "-1=1Gbit/s", "centre.left=1Gbit/s", "switch.up=1Gbit/s", "=1Gbit,", "center=1Gbit", "1.5=",
     "0=0Gbit", "0=1.2.3Gbit", "0=1Gbit,fast", "0=1Gbit,1ms,2ms", ""],
)  # fmt: skip
def test_a_link_that_cannot_be_is_refused_in_a_sentence(setting):
    with pytest.raises(UsageError, match="hint") as refused:
        Links.of(4, Link(1e-3, 1e6), [setting])
    assert f"`--link` is `{setting}`" in str(refused.value)


def test_a_tree_is_connected_and_doubly_stochastic_and_has_no_circle():
    mixing = matrix("tree", 7)
    assert np.count_nonzero(mixing) - 7 == 2 * 6
    np.testing.assert_allclose(mixing.sum(axis=0), 1)
    assert sorted(np.flatnonzero(mixing[1])) == [0, 1, 3, 4]
