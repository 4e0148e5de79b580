"""Every test of the contract that takes a `contestant` runs for each strategy and number of replicas.

A test says with `contestants.among` that fewer will do; a module does with `REPLICAS`.
"""

import pytest

from tests.contract import cases, contestants

OTHER_NUMBERS = [(name, count) for name in ("mirrored", "custom") for count in (1, 3)]


def pytest_generate_tests(metafunc):
    if "contestant" in metafunc.fixturenames:
        of_module = getattr(metafunc.module, "REPLICAS", contestants.REPLICAS)
        replicas = getattr(metafunc.function, "replicas", of_module)
        pairs = contestants.chosen(metafunc.config, replicas)
        metafunc.parametrize("contestant", pairs, ids=[f"{name}-{count}" for name, count in pairs])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves to `make test-all` the numbers of replicas that a case of equality does not depend on.

    And puts side by side what is compared with the same training of stock Keras, which a process does once.
    """
    places, independent = {}, set(cases.CASES) - cases.OF_THE_NUMBER
    for item in items:
        places.setdefault(_reference(item), len(places))
    items.sort(key=lambda item: places[_reference(item)])
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("name") in independent and parameters.get("contestant") in OTHER_NUMBERS:
            item.add_marker(pytest.mark.thorough)


def _reference(item):
    if "contestant" not in getattr(item, "fixturenames", ()):
        return item.nodeid
    others = sorted((name, str(value)) for name, value in item.callspec.params.items() if name != "contestant")
    return item.nodeid.partition("[")[0], tuple(others)
