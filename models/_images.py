"""What the convolutional models share: which inputs they take, and when they pad."""

from __future__ import annotations

from tfdist.data.spec import DataSpec
from tfdist.errors import UsageError


def padding(model: str, spec: DataSpec, kernel: int) -> str:
    """The Keras padding: "valid" where that leaves a pixel, else "same".

    Args:
        model: the model's name, for the message.
        spec: the facts about the dataset.
        kernel: the side of the kernels of two convolutions, each followed by a pooling of 2x2.

    Raises:
        UsageError: the examples are not images `[H, W, C]`.
    """
    if len(spec.input_shape) != 3:
        raise UsageError(
            f"The model `{model}` takes images `(height, width, channels)`, dataset `{spec.name}` has "
            f"examples of shape `{spec.input_shape}`",
            "use `--model mlp`, which takes any shape",
        )
    side = min(spec.input_shape[:2])
    for _ in range(2):
        side = (side - kernel + 1) // 2
    return "valid" if side >= 1 else "same"
