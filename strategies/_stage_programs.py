"""The steps of a pipeline whose stages are in several processes.

    train_step of a micro-batch      in the last stage                    in another stage
    forward                          receive, run, compute the loss       receive, run, send
    backward                         tape, send gradients                 receive gradients, tape, send gradients
    update                           own variables                        own variables

Each process runs the inner loop of `tfdist.core.inner_loop`, with these steps in place of Keras' own. A micro-batch is
a replica in time, as in `tfdist.strategies.pipeline`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.core import contributions, exact_step, gradient_reduction, metrics, randomness, share
from tfdist.core.inner_loop import HOST, LoopState, Outcome, PredictProgram, StepProgram, Steps, joined
from tfdist.core.metrics import Logs
from tfdist.core.steps_per_call import AtNan
from tfdist.data.pipeline.division import Division
from tfdist.internals import keras as keras_internals
from tfdist.internals import keras_stages
from tfdist.stages import previous_weights
from tfdist.stages.one_stage import Pass, Stage, passing
from tfdist.strategies._towers import Tower

if TYPE_CHECKING:
    from tfdist.strategies._stages_of_processes import StagesOfProcesses

# With M micro-batches and S stages, a stage waits (S - 1) / (4 M + S - 1) of the time, and not (S - 1) / (M + S - 1).
# More of them would take longer to trace.
STEPS_TOGETHER = 4


class StageTower(Tower):
    """A micro-batch in the stage of this process; `number` counts on through steps that are ordered together.

    Attributes:
        previous: the weights of before the last update, with which it computes; `None` for the newest ones.
    """

    previous: previous_weights.PreviousWeights | None = None

    def __init__(self, index: int, count: int, home: str, strategy: StagesOfProcesses, step: int):
        super().__init__(index, count, home)
        self.number = step * count + index
        self._strategy = strategy

    def add(self, parts: Sequence[Any]) -> Any:
        # Two at a time, so that a gradient can be freed before that of the next micro-batch is computed.
        return functools.reduce(lambda total, part: gradient_reduction.add([total, part]), parts)

    def apply(
        self, apply: Callable[..., None], gradients: Sequence[Any], optimizer: Any, variables: Sequence[Any] | None
    ) -> None:
        of_stage = self._strategy.of_stage(optimizer)
        assert of_stage is not None and variables is not None
        kept = [index for index, gradient in enumerate(gradients) if gradient is not None]
        updated = [variables[index] for index in kept]

        def update(values: list[Any]) -> None:
            if of_stage.exchanges:  # after all messages of the step
                self._strategy.exchange_of_stages.put_in_order()
            of_stage.apply(apply, values, updated)

        late = update if self.previous is None else self.previous.late(update)
        self.update_each_copy(late, self.of_global_batch([gradients[index] for index in kept]))


@dataclasses.dataclass(frozen=True)
class StageSteps:
    """Keras' steps of one micro-batch, as far as they are of this process' stage.

    Attributes:
        strategy: has the exchange.
        model: the whole model.
        stage: of this process.
    """

    strategy: StagesOfProcesses
    model: Any
    stage: Stage

    def train(self, replica: Any, data: Any) -> Logs:
        """Keras' `train_step`."""
        x, y, sample_weight = keras_stages.unpacked(data)
        model, weights = self.model, self.strategy.own_weights(self.model)
        with tf.GradientTape() as tape:
            one = Pass(self.stage, self.strategy.exchange_of_stages, replica.number, tape.watch)
            outputs = self._forward(replica, one, x, training=True)
            loss = self._loss(replica, one, x, y, outputs, sample_weight, training=True)
            scaled = [] if loss is None else [model.optimizer.scale_loss(loss)]
        begun = [*map(tf.ones_like, scaled), *one.gradients_of_sent()]
        sent, received = [tensor for _, tensor in one.sent], [tensor for _, tensor in one.received]
        gradients = tape.gradient([*scaled, *sent], [*weights, *received], output_gradients=begun)
        one.send_gradients(gradients[len(weights) :])
        if weights:
            model.optimizer.apply_gradients(zip(gradients[: len(weights)], weights, strict=True))
        return self._logs(x, y, outputs, sample_weight)

    def test(self, replica: Any, data: Any) -> Logs:
        """Keras' `test_step`."""
        x, y, sample_weight = keras_stages.unpacked(data)
        one = Pass(self.stage, self.strategy.exchange_of_stages, replica.number)
        outputs = self._forward(replica, one, x, training=False)
        self._loss(replica, one, x, y, outputs, sample_weight, training=False)
        return self._logs(x, y, outputs, sample_weight)

    def predict(self, replica: Any, data: Any) -> Any:
        """Keras' `predict_step`; the result counts in the last stage alone."""
        x, _, _ = keras_stages.unpacked(data)
        one = Pass(self.stage, self.strategy.exchange_of_stages, replica.number)
        return self._forward(replica, one, x, training=False)

    def _forward(self, replica: Any, one: Pass, x: Any, training: bool) -> Any:
        with passing(self.stage.plan.functional, one):
            outputs = keras_stages.called(self.model, x, training)
        # They depend on the examples, as the replica's part of the batch does.
        replica.data, replica.reading = [*replica.data, *one.all_received], None
        one.send()
        return outputs

    def _loss(self, replica: Any, one: Pass, x: Any, y: Any, outputs: Any, sample_weight: Any, training: bool) -> Any:
        """What this stage adds to the loss, `None` if nothing; the last stage notes the sum of all."""
        model = self.model
        if not self.stage.is_last:
            losses = model.losses if self.stage.adds_losses[self.stage.number] else []
            total = tf.add_n([tf.cast(loss, tf.float32) for loss in losses]) if losses else None
            if self.stage.adds_losses[self.stage.number]:
                part = tf.zeros([]) if total is None else contributions.to_value(replica, total)
                one.send_to_last(part)
            return total
        loss = keras_stages.loss_of(model, x, y, outputs, sample_weight, training)
        total = loss
        for source in range(self.stage.number):
            if self.stage.adds_losses[source]:
                of_stage = share.undone(replica, one.receive_in_last(source))
                replica.means.append(of_stage)
                total = total + tf.cast(of_stage, total.dtype)
        keras_stages.note_loss(model, total, x)
        return loss

    def _logs(self, x: Any, y: Any, outputs: Any, sample_weight: Any) -> Logs:
        if self.stage.is_last:
            return self.model.compute_metrics(x, y, outputs, sample_weight=sample_weight)
        return dict.fromkeys(metrics.names(self.model), 0.0)


class StageProgram(StepProgram):
    """Trains or tests one stage."""

    def __init__(self, strategy: StagesOfProcesses, steps: Steps, of_stage: StageSteps):
        self._of_stage, self._stages = of_stage, strategy
        self._kind = steps.kind
        super().__init__(strategy, steps)

    def run(self, state: Any, first: int, count: int) -> Outcome:
        self._stages.exchange_of_stages.begin_call()
        return super().run(state, first, count)

    def _step_function(self, replica: Any) -> Callable[[Any], Logs]:
        step = functools.partial(getattr(self._of_stage, self._kind), replica)
        return functools.partial(self._checked_logs, step, replica)


class DelayedStageProgram(StageProgram):
    """Trains one stage with the schedule `2bw`: a stage begins a step while later stages still compute the one before.

    What crosses steps must be in one graph, so that `STEPS_TOGETHER` of them are traced after one another.
    """

    def __init__(self, strategy: StagesOfProcesses, steps: Steps, of_stage: StageSteps):
        optimizer = strategy.of_stage(steps.model.optimizer)
        # A step that begins before the last one has ended must be sure to come, and no update may wait for others.
        is_sure = steps.batches.length_known and steps.at_nan is not AtNan.STOP
        meets = optimizer is None or optimizer.exchanges
        self._overlaps = is_sure and not meets and strategy.micro_batches >= of_stage.stage.most_ahead
        self._previous = previous_weights.of(steps.model, strategy.own_weights(steps.model))
        super().__init__(strategy, steps, of_stage)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._previous.begin()

    def _step(self, state: Any, batch: Any) -> tuple[tf.Tensor, Logs]:
        with self._previous.computing():
            return super()._step(state, batch)

    def _loop(self, state: Any, first: tf.Tensor, count: tf.Tensor, begun: LoopState) -> LoopState:
        def proceed(done: tf.Tensor, *_: Any) -> tf.Tensor:
            return done + STEPS_TOGETHER <= count

        def body(done: tf.Tensor, more: tf.Tensor, goes_on: tf.Tensor, logs: Any) -> LoopState:
            with self._stages.ordered_together():
                for number in range(STEPS_TOGETHER):
                    with tf.device(HOST):
                        step = first + done + number
                    goes_on, logs = self._step(state, self._batches.fetch(state, step))
            return done + STEPS_TOGETHER, more, goes_on, logs

        if self._overlaps:
            begun = tf.while_loop(proceed, body, begun, parallel_iterations=1)
        return super()._loop(state, first, count, begun)


class StagePredictProgram(PredictProgram):
    """Predicts; the last stage gives its outputs to all processes."""

    def __init__(self, strategy: StagesOfProcesses, steps: Steps, of_stage: StageSteps):
        self._of_stage, self._stages = of_stage, strategy
        super().__init__(strategy, steps)

    def run(self, state: Any, first: int, count: int) -> Outcome:
        self._stages.exchange_of_stages.begin_call()
        outcome = super().run(state, first, count)
        if not outcome.steps:
            return outcome
        outputs = keras_internals.tree.map_structure(keras_internals.to_numpy, outcome.logs["outputs"])
        message = _packed(outputs) if self._of_stage.stage.is_last else b""
        found = self._stages.exchange(message)[-1]
        return dataclasses.replace(outcome, logs={"outputs": _unpacked(found, outputs)})

    def _predict(self, state: Any, batch: Any) -> Any:
        def on_replica(replica: Any) -> Any:
            part = self._batches.part(state, batch, replica.index, Division(replica.count))
            replica.begin(*part, randomness.unseeded_of(self._strategy))
            step = functools.partial(self._of_stage.predict, replica)
            outputs, _ = exact_step.exactly(replica, self._model, step)
            return keras_internals.tree.map_structure(replica.real_rows, outputs)

        return joined(self._strategy.run(on_replica))


def _packed(outputs: Any) -> bytes:
    """A structure of arrays as a message."""
    leaves = [tf.io.serialize_tensor(leaf) for leaf in keras_internals.tree.flatten(outputs)]
    return bytes(tf.io.serialize_tensor(tf.stack(leaves)).numpy())


def _unpacked(message: bytes, like: Any) -> Any:
    """The tensors of a message of `_packed`, in the structure and the dtypes of `like`."""
    leaves = tf.unstack(tf.io.parse_tensor(message, tf.string))
    dtypes = [tf.as_dtype(leaf.dtype) for leaf in keras_internals.tree.flatten(like)]
    tensors = [tf.io.parse_tensor(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return keras_internals.tree.pack_sequence_as(like, tensors)
