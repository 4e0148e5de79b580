"""A plugin of pytest under which each model that a test makes is prepared for `custom` on two devices.

Keras' tests need no such thing as JAX to be there, but one file imports it at its top.
"""

import sys
import types

import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

import tfdist
from tfdist.internals import keras_routes

DEVICES = ["CPU:0", "CPU:1"]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration() for _ in DEVICES]
)
STRATEGY = tfdist.strategy("custom", devices=DEVICES)

_make = TensorFlowTrainer.__init__


def _make_prepared(model, *args, **kwargs):
    _make(model, *args, **kwargs)
    # Not `prepare`: a layer that is mixed with a trainer, as these tests have them, is no `keras.Model`.
    keras_routes.set_strategy(model, STRATEGY)


TensorFlowTrainer.__init__ = _make_prepared
sys.modules.setdefault("jax", types.ModuleType("jax"))


@pytest.fixture(autouse=True)
def _in_scope():
    with STRATEGY.scope():
        yield
