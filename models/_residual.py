"""The basic block of residual networks: two 3x3 convolutions and a shortcut connection.

K. He, X. Zhang, S. Ren and J. Sun, "Deep residual learning for image recognition", CVPR 2016, figure 5 left.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def convolution(image: Any, filters: int, kernel: int, strides: int = 1) -> Any:
    """A convolution without bias, from `[B, H, W, C]` to `[B, H/strides, W/strides, filters]` with sizes rounded up."""
    return layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(
        image
    )


def normalization(image: Any, synchronized: bool) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5, synchronized=synchronized)(image)


def stage(image: Any, filters: int, blocks: int, strides: int, synchronized: bool, projected: bool) -> Any:
    """A sequence of basic blocks, of which the first has stride `strides`.

    Args:
        image: `[B, H, W, C]`.
        filters: the filters of every convolution.
        blocks: the number of blocks.
        strides: the stride of the first block.
        synchronized: whether batch normalizations use the statistics of the global batch.
        projected: whether a shortcut that changes shape is a 1x1 convolution (the paper's option B); otherwise it
            drops pixels and adds channels of zeros (option A, without parameters).
    """
    for block in range(blocks):
        step = strides if block == 0 else 1
        shortcut = image
        if step > 1 or image.shape[-1] != filters:
            if projected:
                shortcut = normalization(convolution(image, filters, 1, step), synchronized)
            else:
                shortcut = _resized(image, filters, step)
        image = layers.ReLU()(normalization(convolution(image, filters, 3, step), synchronized))
        image = normalization(convolution(image, filters, 3), synchronized)
        image = layers.ReLU()(layers.Add()([image, shortcut]))
    return image


def _resized(image: Any, filters: int, strides: int) -> Any:
    if strides > 1:
        image = layers.MaxPooling2D(1, strides)(image)
    channels = filters - image.shape[-1]
    return keras.ops.pad(image, [[0, 0], [0, 0], [0, 0], [channels // 2, channels - channels // 2]])
