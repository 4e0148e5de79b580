"""Gradient tapes whose gradients are reduced over Horovod's processes, for variables of Keras 3 and TensorFlow.

with tf.GradientTape() as tape:
    loss = loss_function(labels, model(images, training=True))
tape = hvd.DistributedGradientTape(tape, examples=len(images))
gradients = tape.gradient(loss, model.trainable_variables)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UsageError
from tfdist.groups import horovod as engine
from tfdist.horovod import operations, reduction
from tfdist.internals import keras as keras_internals


class DistributedGradientTape(tf.GradientTape):
    """Wraps `gradtape` so that its `gradient` returns gradients that are reduced over all processes.

    As in Horovod, `jacobian` and `batch_jacobian` are not reduced.

    Args:
        gradtape: any `tf.GradientTape`, including persistent ones. It may be entered before or through this object.
        device_dense: the device on which dense gradients are reduced; Horovod chooses by default.
        device_sparse: the device on which sparse gradients are gathered.
        compression: `hvd.Compression.fp16` halves the bytes; `None` sends gradients unchanged.
        sparse_as_dense: sum `tf.IndexedSlices` as dense tensors, instead of gathering their rows.
        op: `hvd.Average` or `hvd.Sum`; `None` means `hvd.Average`.
        gradient_predivide_factor: with `op=hvd.Average`, divide by it before the sum and multiply after.
        scale_local_gradients: average the gradients of local sources as if the other processes had none.
        examples: the number of examples in the batch of this process, a number or a scalar tensor. The gradients are
            then averaged over the examples of all processes, which gives the gradient of the global batch. In the
            `train_step` of a Keras model this number is known; elsewhere, without this argument, all processes have
            equal weights, as in Horovod.
        average_over: "processes" gives all processes equal weights in a `train_step` too.
        others: `num_groups`, `groups` and `process_set`, which are not supported here; see `reduction.LEFT_OUT`.

    Raises:
        UsageError: an argument is not supported, or Horovod is missing.
    """

    @tf.autograph.experimental.do_not_convert
    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = None,
        sparse_as_dense: bool = False,
        op: Any = None,
        gradient_predivide_factor: float = 1.0,
        *,
        scale_local_gradients: bool = True,
        examples: Any = None,
        average_over: str = reduction.EXAMPLES,
        **others: Any,
    ):
        self._inner = gradtape
        self._scale_local_gradients = scale_local_gradients
        self._local: set[int] = set()
        self._examples = examples
        self._reduction = reduction.checked(
            "DistributedGradientTape",
            op,
            gradient_predivide_factor,
            average_over,
            others,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
        )
        if examples is not None and not self._reduction.weights_by_examples:
            raise UsageError(
                "DistributedGradientTape received `examples`, but does not average over them",
                "remove `examples`, or `op` and `average_over`",
            )
        reduction.install_batches()

    def __enter__(self) -> DistributedGradientTape:
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Any:
        return self._inner.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def watch(self, tensor: Any) -> None:
        self._inner.watch(keras.tree.map_structure(_plain, tensor))

    def stop_recording(self) -> Any:
        return self._inner.stop_recording()

    def reset(self) -> None:
        self._inner.reset()

    def watched_variables(self) -> Any:
        return self._inner.watched_variables()

    def jacobian(self, target: Any, sources: Any, *arguments: Any, **named: Any) -> Any:
        return self._inner.jacobian(target, keras.tree.map_structure(_plain, sources), *arguments, **named)

    def batch_jacobian(self, target: Any, source: Any, *arguments: Any, **named: Any) -> Any:
        return self._inner.batch_jacobian(target, _plain(source), *arguments, **named)

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Returns the reduced gradients, in the structure of `sources`; those of local sources are not reduced.

        Args:
            target: see `tf.GradientTape.gradient`.
            sources: a variable of Keras or TensorFlow, a tensor, or a structure of them.
            output_gradients: see `tf.GradientTape.gradient`.
            unconnected_gradients: see `tf.GradientTape.gradient`. The same gradients must be `None` in all processes.
            use_generic_names: has no effect; names never depend on the variables.
        """
        del use_generic_names
        flat = tf.nest.flatten(sources)
        plain = [_plain(source) for source in flat]
        gradients = self._inner.gradient(target, plain, output_gradients, unconnected_gradients)
        shared = [index for index, source in enumerate(flat) if _identity(source) not in self._local]
        with operations.named("the gradients of a tape"):
            name = operations.next_name("DistributedGradientTape")
            weight = self._weight(gradients, name)
            reduced = self._reduction.reduce([gradients[index] for index in shared], name, weight)
        reduced_by_index = dict(zip(shared, reduced, strict=True))
        results = [
            reduced_by_index[index] if index in reduced_by_index else self._scaled_local(gradient, weight)
            for index, gradient in enumerate(gradients)
        ]
        return tf.nest.pack_sequence_as(sources, results)

    def register_local_source(self, source: Any) -> None:
        """Marks a variable of this process alone, whose gradient is not reduced."""
        self._local.add(_identity(source))

    @tf.autograph.experimental.do_not_convert
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Returns the (source, gradient) pairs of local sources, and those of all others."""
        gradients = self.gradient(target, list(sources), output_gradients, use_generic_names=use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if _identity(pair[0]) in self._local]
        return local, [pair for pair in pairs if _identity(pair[0]) not in self._local]

    def _weight(self, gradients: list[Any], name: str) -> tf.Tensor | None:
        examples = reduction.current_batch().examples if self._examples is None else self._examples
        if examples is None or not self._reduction.weights_by_examples:
            return None
        # A graph may contain several steps; the number of examples is sent after a gradient of its own step.
        first = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None][:1]
        with tf.control_dependencies(first):
            return reduction.weight_of_process(examples, name)

    def _scaled_local(self, gradient: Any, weight: tf.Tensor | None) -> Any:
        if not self._scale_local_gradients:
            return gradient
        weight = tf.constant(1.0, tf.float64) if weight is None else weight
        return reduction.scaled(gradient, weight / engine.load().size())


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape, *arguments: Any, local_layers: Collection[Any] | Any = (), **options: Any
) -> DistributedGradientTape:
    """Returns a `DistributedGradientTape` that does not reduce the gradients of some layers.

    Args:
        gradtape: any `tf.GradientTape`.
        arguments: positional arguments of `DistributedGradientTape`.
        local_layers: a layer, or layers, whose weights differ between the processes.
        options: options of `DistributedGradientTape`.

    Raises:
        UsageError: `local_layers` contains something else than layers, or for the reasons of `DistributedGradientTape`.
    """
    layers = [local_layers] if isinstance(local_layers, keras.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise UsageError(
                f"`local_layers` takes layers of Keras 3. Received: `{layer!r}`", "pass a layer, or a list of layers"
            )
    tape = DistributedGradientTape(gradtape, *arguments, **options)
    for layer in layers:
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def _plain(source: Any) -> Any:
    return keras_internals.tf_variable(source) if isinstance(source, keras.Variable) else source


def _identity(source: Any) -> int:
    return id(_plain(source))
