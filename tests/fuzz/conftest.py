"""A pipeline refuses a model that cannot be cut; a case must then hold with one stage, as in the contract's suite."""

from tests.contract.conftest import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]
