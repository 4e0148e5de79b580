"""Every test of the contract that takes a `contestant` runs for each strategy and number of replicas.

A test says with `contestants.among` that fewer will do; a module does with `REPLICAS`.
"""

import itertools

import pytest

from tests.contract import cases, comparison, contestants
from tfdist.errors import UsageError


def pytest_generate_tests(metafunc):
    if "contestant" in metafunc.fixturenames:
        of_module = getattr(metafunc.module, "REPLICAS", contestants.REPLICAS)
        replicas = getattr(metafunc.function, "replicas", of_module)
        pairs = contestants.chosen(metafunc.config, replicas)
        metafunc.parametrize("contestant", pairs, ids=[f"{name}-{count}" for name, count in pairs])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves to `make test-all` the contestants that would show nothing new, and of several cases all but one in turn.

    And puts side by side what is compared with the same training of stock Keras, which a process does once.
    """
    places = {}
    for item in items:
        places.setdefault(_reference(item), len(places))
    items.sort(key=lambda item: places[_reference(item)])
    held = [item for item in items if "contestant" in getattr(item, "fixturenames", ())]
    quick = [item for item in held if _shows_something_new(item) and not item.get_closest_marker("exhaustive")]
    of_others = set(map(id, held)) - set(map(id, _in_turn(quick)))
    for item in held:
        if id(item) in of_others:
            item.add_marker(pytest.mark.exhaustive)


def _in_turn(items):
    """Of a test of several cases each with one contestant, which they take in turn; of other tests all items."""
    tests = {}
    for item in items:
        test, *case = _reference(item)
        tests.setdefault(test, {}).setdefault(tuple(case), []).append(item)
    chosen = []
    for of_cases in tests.values():
        for number, of_contestants in enumerate(of_cases.values()):
            in_turn = [of_contestants[number % len(of_contestants)]]
            chosen += in_turn if len(of_cases) > 1 else of_contestants
    return chosen


# The outer loop, which calls callbacks and orders batches, is written once for all strategies.
OF_THE_OUTER_LOOP = ("test_callbacks.py", "test_between_steps.py", "test_order.py")


def _shows_something_new(item):
    contestant = item.callspec.params["contestant"]
    if not isinstance(contestant, tuple):  # pytest's mark for none
        return True
    if item.path.name == "test_same_call.py" and contestant[0] == "single":
        return False  # its arguments and data go the way of those of `custom`
    if item.path.name in OF_THE_OUTER_LOOP:
        return contestant[0] not in ("mirrored", "pipeline")
    case = item.callspec.params.get("name") if item.path.name == "test_equality.py" else None
    return case is None or cases.shows(case, contestant)


@pytest.fixture
def same_as_stock(contestant, request):
    """`same_as_stock(run)`: `run(contestant)` gives what `run(STOCK)` gives, which a test's contestants share."""
    calls = itertools.count()

    def compare(run, tolerance=5e-5):
        found, key = run(contestant), (_reference(request.node), next(calls))
        if key not in _of_stock:
            _of_stock[key] = run(comparison.STOCK)
        comparison.assert_same(found, _of_stock[key], tolerance)

    return compare


_of_stock = {}


def _reference(item):
    if "contestant" not in getattr(item, "fixturenames", ()):
        return item.nodeid
    others = sorted((name, str(value)) for name, value in item.callspec.params.items() if name != "contestant")
    return item.nodeid.partition("[")[0], tuple(others)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Several stages of a pipeline refuse a model that cannot be cut; the test must then pass with one stage.

    A pipeline of several processes refuses more, and has no other way. Neither has `multiworker` with stages in a job:
    TensorFlow has started, and did not know the cluster, which `multiworker` without stages needs.
    """
    name, _ = (getattr(pyfuncitem, "callspec", None) and pyfuncitem.callspec.params.get("contestant")) or ("", 0)
    if name not in contestants.STAGES:
        return None
    arguments = {argument: pyfuncitem.funcargs[argument] for argument in pyfuncitem._fixtureinfo.argnames}
    try:
        pyfuncitem.obj(**arguments)
    except UsageError as refused:
        across = contestants.WORLD.world_size > 1 and name in contestants.PIPELINES
        if not any(reason in str(refused) for reason in (*REFUSED, *(REFUSED_ACROSS if across else ()))):
            raise
        pyfuncitem.user_properties.append(("refused", str(refused)))
        if across or (contestants.WORLD.world_size > 1 and name == "multiworker_stages"):
            pytest.skip(str(refused).partition("\n")[0])
        with contestants.in_one_stage():
            pyfuncitem.obj(**arguments)
    return True


REFUSED = (
    "cannot be cut into stages, because it has a custom `call`",
    "stages were requested, and the model",  # which has one layer
    "would be built in its first eager step",
)
REFUSED_ACROSS = (
    "Micro-batches exchange values within a step",
    "has nothing to train",
    "is compiled with `run_eagerly=True`, and a pipeline of several processes",
)
