"""Every model of the zoo learns with its usual settings: optimizer, scaled learning rate, warm-up, initial weights."""

import keras
import pytest

import tfdist
from tests import zoo
from tfdist import models
from tfdist.run import optimizers
from tfdist.run.config import TrainConfig

EPOCHS = 5


def test_every_model_is_tried():
    assert {zoo.name_of(case) for case in zoo.LEARNS} == set(models.names())


def losses(case, batch_size, steps):
    """The validation losses before and after a training with the usual settings of the model."""
    learnable, name = zoo.LEARNS[case], zoo.name_of(case)
    keras.utils.set_random_seed(0)
    steps_per_epoch = steps // EPOCHS
    source = zoo.learnable_data(learnable.data, batch_size, steps_per_epoch)
    has_streams = models.knows(name, "streams")
    streams = {"streams": batch_size} if has_streams else {}
    strategy = tfdist.strategy("single", seed=0)
    train, validation = (
        source.feed(split, batch_size, world=strategy.world, seed=0, stream_positions=has_streams)
        for split in ("train", "validation")
    )
    model = models.build(name, source.spec, **streams, **learnable.options)
    config = TrainConfig("single", name, "synthetic", batch_size=batch_size, epochs=EPOCHS)
    optimizers.compile(model, source.spec, config, steps_per_epoch)
    before = strategy.evaluate(model, validation, return_dict=True, verbose=0)["loss"]
    history = strategy.fit(model, train, epochs=EPOCHS, validation_data=validation, verbose=0).history
    return before, history["val_loss"][-1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("batch_size", [32, 256])
@pytest.mark.parametrize("case", zoo.LEARNS)
def test_a_model_learns_with_its_usual_settings_whatever_the_batch(case, batch_size):
    number = [32, 256].index(batch_size)
    before, after = losses(case, batch_size, zoo.LEARNS[case].steps[number])
    assert after < zoo.LEARNS[case].parts[number] * before, f"{before:.4g} became {after:.4g}"
