"""Models of keras-hub under a strategy, equal to stock Keras; the backbones are small and built without a network."""

import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist

PAGE = Path(__file__).parent.parent / "docs" / "keras_hub.md"
LENGTH = 12


def data():
    generator = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < generator.integers(4, LENGTH + 1, (20, 1))).astype("int32")
    tokens = generator.integers(1, 50, (20, LENGTH)) * mask
    x = {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": mask}
    return x, generator.integers(0, 3, 20)


def classifier(policy):
    keras_hub = pytest.importorskip("keras_hub")
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    try:
        sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
        backbone = keras_hub.models.BertBackbone(50, **sizes, max_sequence_length=LENGTH, dropout=0.1)
        backbone.enable_lora(4)
        model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.1)
    finally:
        keras.config.set_dtype_policy("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["mirrored", "custom"])
@pytest.mark.parametrize(("policy", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 2e-2)])
def test_fine_tuning_with_lora_gives_the_weights_of_stock_keras(strategy, policy, tolerance):
    x, y = data()
    reference = classifier(policy)
    before = [np.array(weight) for weight in reference.get_weights()]
    expected = reference.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    chosen = tfdist.strategy(strategy, devices=2)
    with chosen.scope():
        model = chosen.prepare(classifier(policy))
    found = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=tolerance)
    pairs = list(zip(before, reference.get_weights(), model.get_weights(), strict=True))
    moved = sum(np.any(old != new) for old, new, _ in pairs)
    assert 0 < len(model.trainable_variables) < len(model.weights) and 0 < moved < len(pairs)
    for _, weight, other in pairs:
        np.testing.assert_allclose(other, weight, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(model.predict(x, verbose=0), reference.predict(x, verbose=0), atol=10 * tolerance)


@pytest.mark.thorough
def test_the_scripts_of_the_page_run(tmp_path):
    pytest.importorskip("keras_hub")
    script, module = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "tiny_bert.py").write_text(module)
    (command,) = re.findall(r"^\$ tfdist (.*)$", PAGE.read_text(), re.MULTILINE)
    small = ["--limit", "64", "--run-dir", "run"]
    for arguments in (["script.py"], ["-m", "tfdist", *command.split(), *small]):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert (tmp_path / "adapter.lora.h5").exists() and (tmp_path / "run").exists()
