"""Helpers for models: checks of the dataset, scaled widths, padding for any image size, and Keras' applications."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.data.spec import DataSpec
from tfdist.errors import UsageError

_SMALLEST_OF_APPLICATIONS = 32


def require_images(model: str, spec: DataSpec, smallest: int = 1) -> None:
    """Raises `UsageError` for examples that are not images `[H, W, C]`, or have a side below `smallest` pixels."""
    if len(spec.input_shape) != 3:
        raise UsageError(
            f"The model `{model}` takes images `(height, width, channels)`, but the dataset `{spec.name}` has "
            f"examples of shape `{spec.input_shape}`",
            "use `--model mlp`, which takes any shape",
        )
    if min(spec.input_shape[:2]) < smallest:
        raise UsageError(
            f"The model `{model}` takes images of {smallest}x{smallest} pixels or more, but the dataset `{spec.name}` "
            f"has examples of shape `{spec.input_shape}`",
            f"use `--model {'vae' if spec.task == 'generation' else 'cnn'}`, which takes small images",
        )


def scaled(units: int, width: float) -> int:
    """`units` times `width`, rounded, and at least 1."""
    return max(1, round(units * width))


def padding(spec: DataSpec, kernel: int) -> str:
    """The padding of layers: "valid" if that leaves at least one pixel after both convolutions, else "same".

    Args:
        spec: the spec of the dataset.
        kernel: the kernel size of two convolutions, each followed by 2x2 pooling.
    """
    side = min(spec.input_shape[:2])
    for _ in range(2):
        side = (side - kernel + 1) // 2
    return "valid" if side >= 1 else "same"


def padded(image: Any, multiple: int) -> Any:
    """Pads `image` `[B, H, W, C]` at the bottom and the right with zeros to multiples of `multiple`."""
    bottom, right = (-size % multiple for size in image.shape[1:3])
    return keras.layers.ZeroPadding2D(((0, bottom), (0, right)), name="padded")(image) if bottom or right else image


def cropped(image: Any, spec: DataSpec) -> Any:
    """Removes the padding of `padded` from `image` `[B, H', W', C]`, down to the size of the examples."""
    bottom, right = (current - size for current, size in zip(image.shape[1:3], spec.input_shape, strict=False))
    if not (bottom or right):
        return image
    return keras.layers.Cropping2D(((0, bottom), (0, right)), dtype="float32", name="cropped")(image)


def adapted(
    application: Callable[..., keras.Model],
    spec: DataSpec,
    *,
    width: float,
    synchronized: bool = False,
    initializer: str | None = None,
    pads: bool = False,
    change: Callable[[keras.layers.Layer, dict[str, Any]], None] | None = None,
    **arguments: Any,
) -> keras.Model:
    """Builds a model of `keras.applications` with new weights and float32 logits, for pixels in [0, 1].

    Args:
        application: a function such as `keras.applications.ResNet50`.
        spec: the spec of the dataset, with the shape of its images and its classes.
        width: a factor on the filters of convolutions and the units of hidden dense layers.
        synchronized: whether batch normalizations use the statistics of the global batch.
        initializer: the initializer of the kernels of all layers but the last; by default those of the application.
        pads: whether smaller images are padded with zeros to the application's smallest, 32x32.
        change: changes the config of a layer, in place.
        **arguments: arguments of the application.
    """
    inputs = keras.Input(spec.input_shape)
    image = _enlarged(inputs, _SMALLEST_OF_APPLICATIONS) if pads else inputs
    original = application(
        weights=None, input_tensor=image, classes=spec.classes, classifier_activation=None, **arguments
    )
    # Its input is a list of one, about which Keras warns whenever the model is called with pictures.
    original = keras.Model(inputs, original.output, name=original.name)
    # Layers after the last with weights, such as a flattening, compute in float32 too.
    last = max(index for index, layer in enumerate(original.layers) if layer.weights)
    logits, ending = original.layers[last].name, {layer.name for layer in original.layers[last:]}

    def adapt(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, keras.Sequential):
            return keras.Sequential([adapt(part) for part in layer.layers], name=layer.name)
        config: dict[str, Any] = layer.get_config()
        if layer.name in ending:
            config["dtype"] = "float32"
        if layer.name != logits:
            for size in {"filters", "units"} & config.keys():
                config[size] = scaled(config[size], width)
            if "kernel_initializer" in config and initializer is not None:
                config["kernel_initializer"] = initializer
        if isinstance(layer, keras.layers.BatchNormalization):
            # Keras' moving averages follow so slowly that evaluation fails for hundreds of steps.
            config |= {"synchronized": synchronized, "momentum": 0.9}
        if isinstance(layer, keras.layers.Rescaling):
            config["scale"] *= 255  # applications take pixels up to 255
        if change is not None:
            change(layer, config)
        if config.get("groups", 1) > 1:  # TensorFlow has no grouped convolution for CPUs
            return _depthwise(config)
        return type(layer).from_config(config)

    return keras.models.clone_model(original, clone_function=adapt)


def _enlarged(image: Any, smallest: int) -> Any:
    """Pads `image` `[B, H, W, C]` at the bottom and the right with zeros to `smallest` pixels per side or more."""
    bottom, right = (max(0, smallest - size) for size in image.shape[1:3])
    return keras.layers.ZeroPadding2D(((0, bottom), (0, right)), name="padded")(image) if bottom or right else image


def _depthwise(config: dict[str, Any]) -> keras.layers.Layer:
    """The depthwise convolution that equals a convolution with one group per filter."""
    names = ("name", "dtype", "trainable", "kernel_size", "strides", "padding", "dilation_rate", "activation")
    same = {name: config[name] for name in (*names, "use_bias", "bias_initializer")}
    return keras.layers.DepthwiseConv2D(**same, depthwise_initializer=config["kernel_initializer"])
