"""Every test of the contract that takes a `contestant` runs for each strategy and number of replicas.

A module whose tests are about what does not depend on the number of replicas says `REPLICAS = contestants.FEW`.
"""

from tests.contract import contestants


def pytest_generate_tests(metafunc):
    if "contestant" in metafunc.fixturenames:
        replicas = getattr(metafunc.module, "REPLICAS", contestants.REPLICAS)
        pairs = contestants.chosen(metafunc.config, replicas)
        metafunc.parametrize("contestant", pairs, ids=[f"{name}-{count}" for name, count in pairs])
