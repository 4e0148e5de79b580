"""Stock Keras to compare with, and what "the same" means: same structure, same words, numbers to rounding."""

import contextlib

import keras
import numpy as np

from tests.contract import contestants


class Stock:
    """Keras' own methods, on one device."""

    scope = contextlib.nullcontext

    def fit(self, model, *args, **kwargs):
        return model.fit(*args, **kwargs)

    def evaluate(self, model, *args, **kwargs):
        return model.evaluate(*args, **kwargs)

    def predict(self, model, *args, **kwargs):
        return model.predict(*args, **kwargs)


STOCK = ("stock", 1)


def start(contestant, **options):
    """The strategy of a contestant, or `Stock`, with the seeds as every training begins with."""
    keras.utils.set_random_seed(11)
    return Stock() if contestant == STOCK else contestants.start(*contestant, **options)


def assert_same(found, expected, tolerance=5e-5, where=""):
    """Fails at the first difference, and says where it is."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_same(found[key], value, tolerance, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{where}: {found} is not {expected}"
        for index, value in enumerate(expected):
            assert_same(found[index], value, tolerance, f"{where}[{index}]")
    elif expected is None or isinstance(expected, str | bool):
        assert found == expected, where
    else:
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=where)
