"""Every test of the contract that takes a `contestant` runs for each strategy and number of replicas.

A test says with `contestants.among` that fewer will do; a module does with `REPLICAS`.
"""

from tests.contract import contestants


def pytest_generate_tests(metafunc):
    if "contestant" in metafunc.fixturenames:
        of_module = getattr(metafunc.module, "REPLICAS", contestants.REPLICAS)
        replicas = getattr(metafunc.function, "replicas", of_module)
        pairs = contestants.chosen(metafunc.config, replicas)
        metafunc.parametrize("contestant", pairs, ids=[f"{name}-{count}" for name, count in pairs])
