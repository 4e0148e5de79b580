"""What a step is spent on, in real traces of steps whose parts are known."""

import doctest
import time

import pytest
import tensorflow as tf

from tfdist.profiling import breakdown, trace

SECONDS = {"input": 0.125, "compute": 0.1, "communication": 0.075, "waiting": 0.05}


def test_the_synopsis_runs():
    assert doctest.testmod(breakdown).failed == 0


def sleeping(kind, x, took, name=None):
    """`x`, after a while; `took` is given how long that was."""

    def sleep(value):
        began = time.perf_counter()
        time.sleep(SECONDS[kind])
        took.setdefault(kind, []).append(time.perf_counter() - began)
        return value

    return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype, name=name), x.shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("prefetched", [False, True])
def test_each_part_of_a_step_is_told_to_a_twentieth(tmp_path, prefetched):
    """A function of the user's computes, tfdist's own exchange tensors, and Python outside of the graph is waiting."""
    took = {}
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = prefetched
    batches = iter(tf.data.Dataset.range(100).map(lambda x: sleeping("input", x, took)).with_options(options))

    @tf.function
    def step():
        computed = sleeping("compute", next(batches), took)
        return sleeping("communication", computed, took, name=breakdown.EXCHANGE)

    step()
    with trace.trace(tmp_path):
        for number in range(9):
            with trace.step_marker(number):
                time.sleep(SECONDS["waiting"])
                step()
    found = trace.summarize(tmp_path).breakdown
    by_hand = {kind: sum(times[-8:-1]) / 7 for kind, times in took.items()} | {"waiting": SECONDS["waiting"]}
    for kind, seconds in {**by_hand, **({"input": 0.0} if prefetched else {})}.items():
        # Anything that the machine does beside is waiting.
        allowed = max(0.05 * seconds, 0.001) if kind != "waiting" else 0.05 * sum(SECONDS.values())
        assert getattr(found, f"{kind}_seconds") == pytest.approx(seconds, abs=allowed), found
    assert sum(found.shares().values()) == pytest.approx(1)
    assert "communication" in trace.as_text(trace.summarize(tmp_path))


def test_what_computation_hides_is_no_communication_and_no_step_is_no_breakdown():
    operations = [breakdown.Operation("a:MatMul", 0.0, 4.0), breakdown.Operation("b:CollectiveReduceV2", 1.0, 5.0)]
    found = breakdown.of_process(operations, fetches=[], steps=[(0.0, 5.0)])
    assert (found.compute_seconds, found.communication_seconds) == (4.0, 1.0)
    assert breakdown.of_process(operations, [], []) is None
    assert breakdown.of_process(operations, [], [(8.0, 9.0)]) is None
    assert breakdown.of_all([]) is None


def test_an_asynchronous_operation_lasts_from_its_start_to_its_end():
    def event(name, begin, step, **more):
        about = {"name": "grads", "kernel_type": "HorovodAllreduce", "step_id": step, **more}
        return {"name": f"ExecutorState::ProcessAsync::{name}", "ts": begin * 1e6, "dur": 5.0, "args": about}

    events = [event("Done", 3.0, "1"), event("Start", 1.0, "1"), event("Start", 4.0, "2"), event("Done", 6.0, "2")]
    found = breakdown.operations_of([*events, event("Done", 9.0, "3")])
    assert found == [("grads:HorovodAllreduce", 1.0, 3.0), ("grads:HorovodAllreduce", 4.0, 6.0)]
