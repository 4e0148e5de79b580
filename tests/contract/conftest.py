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
    """Leaves to `make test-all` what no other number of replicas can change: which formula an optimizer has."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("name") in cases.FORMULAS and parameters["contestant"] in OTHER_NUMBERS:
            item.add_marker(pytest.mark.thorough)
