"""Every test of the contract that takes a `contestant` runs for each strategy and number of replicas."""

from tests.contract import contestants


def pytest_generate_tests(metafunc):
    if "contestant" in metafunc.fixturenames:
        pairs = contestants.chosen(metafunc.config)
        metafunc.parametrize("contestant", pairs, ids=[f"{name}-{count}" for name, count in pairs])
