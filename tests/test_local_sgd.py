"""`local_sgd` and `gossip` in one process: rules, what is sent in fewer bytes, and what they refuse."""

import keras
import numpy as np
import pytest

import tfdist
from tfdist import strategies
from tfdist.data.input.dataset_feed import BatchFeed
from tfdist.errors import UnknownNameError, UsageError
from tfdist.interface.variables import strategy_state
from tfdist.relaxed import averages, compression, outer_rules
from tfdist.relaxed import outer as outer_weights
from tfdist.verification import comparison as verification


def made(optimizer="sgd"):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    return model


def examples():
    x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
    return x, x.sum(1)


def fit(strategy, model, **options):
    return strategy.fit(model, *examples(), batch_size=5, verbose=0, **options)


def restored(strategy, model):
    return verification.restored(strategy, model, BatchFeed(examples()).spec)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_slow_momentum_goes_on_where_processes_have_moved_to(momentum):
    rule, start, memory = outer_rules.SlowMo(momentum), np.array([1.0, -1.0]), np.zeros(2)
    for _ in range(3):
        mean = start - np.array([0.2, 0.1])
        new, memory = rule(start, mean, memory, 0.1)
        moved, start = start - new, new
    sizes = 1 + momentum + momentum**2  # of a step along moves that are the same each time
    np.testing.assert_allclose(moved, sizes * np.array([0.2, 0.1]))


def test_elastic_weights_and_their_centre_move_towards_each_other():
    """The sum over all processes and the centre stays, as Zhang et al. have it."""
    own, centre = np.array([1.0, 4.0, -2.0]), np.float64(0.5)
    new = [outer_rules.elastic(one, centre, own.mean(), 0.3, 3) for one in own]
    centres = {round(one[1], 12) for one in new}
    assert len(centres) == 1
    assert sum(one[0] for one in new) + centres.pop() == pytest.approx(own.sum() + centre)
    assert all(abs(one[0] - centre) <= abs(before - centre) for one, before in zip(new, own, strict=True))


@pytest.mark.parametrize(("name", "size", "most"), [("bf16", 2, 2**-8), ("fp16", 2, 2**-11), ("int8", 1, 1 / 127)])
@pytest.mark.parametrize("length", [0, 1, 1024, 3000])
def test_what_is_encoded_comes_back_rounded(name, size, most, length):
    values = np.random.default_rng(0).normal(size=length).astype("float32")
    sent = compression.encode(name, values)
    assert len(sent) <= size * length + 4 * -(-length // compression.BLOCK) * (name == "int8")
    back = compression.decode(name, sent, length)
    assert back.dtype == np.float32
    np.testing.assert_allclose(back, values, atol=most * max(abs(values).max(initial=0), 1))


def test_zeros_are_sent_as_zeros():
    for name in ("bf16", "fp16", "int8"):
        assert not compression.decode(name, compression.encode(name, np.zeros(5, "float32")), 5).any()


def test_what_is_lost_as_moves_are_encoded_is_sent_with_the_next_ones():
    """Of two processes, each of which keeps what was lost of its own moves (Karimireddy et al., ICML 2019)."""
    weight = keras.Variable(np.zeros(50, np.float32))
    outer = outer_weights.RuleOuterOptimizer([weight], "CPU:0", outer_rules.average)
    outer.begin()
    feedback = averages._ErrorFeedback(outer, "int8")
    moved, theirs = np.random.default_rng(0).normal(size=(2, 50)).astype("float32")
    sent = []

    def of_all(encoding, values):
        arrived = [compression.decode(encoding, compression.encode(encoding, one), 50) for one in (values, theirs)]
        sent.append(arrived[0])
        return arrived

    for step in range(4):
        weight.assign((step + 1) * moved)
        _, mean = feedback.exchange(of_all, [0.5, 0.5], 0)
        np.testing.assert_allclose(mean, (sent[-1] + theirs) / 2, atol=0.02)
        # As if nothing had come: the moves of the next step are all that were made so far.
        expected = sum((moment + 1) * moved for moment in range(step + 1))
        np.testing.assert_allclose(sum(sent) + feedback.lost[0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("steps_per_execution", [2, 4])
def test_processes_meet_within_a_call_of_several_steps_too(steps_per_execution):
    weights = []
    for steps in (1, steps_per_execution):
        keras.utils.set_random_seed(0)
        model = made()
        model.compile("sgd", "mse", steps_per_execution=steps)
        watches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        strategy = tfdist.strategy("local_sgd", outer="slowmo", sync_every=3, seed=1)
        fit(strategy, model, epochs=2, shuffle=False, callbacks=[watches])
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_slow_momentum_goes_on_at_a_learning_rate_of_zero():
    """A cosine ends at zero with the last step, and a callback may freeze the weights for some epochs."""
    freeze = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.0 if epoch == 1 else 0.01)
    for rate, callbacks in ((keras.optimizers.schedules.CosineDecay(0.01, 8), []), (0.01, [freeze])):
        weights = []
        for strategy in (
            tfdist.strategy("local_sgd", outer="slowmo", slow_momentum=0.0, sync_every=2),
            tfdist.strategy("single"),
        ):
            keras.utils.set_random_seed(0)
            model = made(keras.optimizers.SGD(rate))
            fit(strategy, model, epochs=3, shuffle=False, callbacks=callbacks)
            weights.append(model.get_weights())
        for averaged, expected in zip(*weights, strict=True):  # one process without momentum trains as usual
            np.testing.assert_allclose(averaged, expected, rtol=1e-5)


def test_the_memory_of_a_rule_is_kept_from_one_fit_to_the_next():
    """Two fits of an epoch end as one of two does, as they do with an optimizer's own momentum."""
    strategy = tfdist.strategy("local_sgd", outer="slowmo", sync_every=2, seed=1)
    found = []
    for fits in ([2], [1, 1]):
        keras.utils.set_random_seed(0)
        model = made()
        for epochs in fits:
            fit(strategy, model, epochs=epochs, shuffle=False)
        found.append(model.get_weights())
    for whole, halves in zip(*found, strict=True):
        np.testing.assert_array_equal(whole, halves)


def test_verifying_leaves_nothing_for_a_rule_to_remember():
    """A rule's memory after a verification would move the weights of the training that follows."""

    def trained(verified):
        keras.utils.set_random_seed(0)
        strategy, model = tfdist.strategy("local_sgd", outer="slowmo", sync_every=2, seed=1), made()
        fit(strategy, model, shuffle=False)
        if verified:
            with restored(strategy, model):
                fit(strategy, model, shuffle=False)
        fit(strategy, model, shuffle=False)
        return model.get_weights()

    for plain, after in zip(trained(False), trained(True), strict=True):
        np.testing.assert_array_equal(after, plain)


def test_a_verification_of_a_new_model_leaves_it_without_a_memory():
    strategy, model = tfdist.strategy("local_sgd", outer="slowmo", sync_every=2), made()
    with restored(strategy, model):
        fit(strategy, model)
        assert strategy_state(model).shared
    assert not strategy_state(model).shared


def test_what_another_rule_has_kept_for_each_process_is_not_taken_for_ones_own(tmp_path):
    """Both keep a variable for each weight, of the same shapes: what compression lost, and distances from a centre."""
    kept = tfdist.callbacks.Checkpoint(tmp_path, resume=True)
    first = tfdist.strategy("local_sgd", outer="easgd", sync_every=2, seed=1)
    fit(first, made(), callbacks=[kept])
    then, model = tfdist.strategy("local_sgd", outer="slowmo", compression="int8", sync_every=2, seed=1), made()
    fit(then, model, epochs=1, callbacks=[tfdist.callbacks.Checkpoint(tmp_path, resume=True)])
    assert not any(np.any(variable.numpy()) for variable in strategy_state(model).own)


def test_a_saved_model_has_nothing_of_the_strategy(tmp_path):
    strategy, model = tfdist.strategy("local_sgd", outer="diloco", sync_every=2), made("adam")
    fit(strategy, model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.variables) == len(model.variables)
    fit(tfdist.strategy("single"), loaded)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"outer": "slomo"}, "Unknown outer rule `slomo`"),
        (
            {"outer": "diloco", "slow_rate": 0.5},
            "`slow_rate` is an option of `slowmo`, and `outer` is `diloco`",
        ),
        ({"moving_rate": 0.1}, "`moving_rate` is an option of `easgd`, and `outer` is `average`"),
        ({"engine": "gloo"}, "Unknown engine `gloo`"),
        ({"compression": "int4"}, "Unknown compression `int4`"),
        ({"sync_every": 0}, "cannot have `0` as `sync_every`"),
        ({"outer": "slowmo", "slow_momentum": 1.5}, "cannot have `1.5` as `slow_momentum`"),
        ({"outer": "easgd", "moving_rate": 2}, "cannot have `2` as `moving_rate`"),
        ({"outer": "diloco", "fragments": 2, "sync_every": "epoch"}, "and `sync_every` is `epoch`"),
        ({"outer": "diloco", "overlap": 4, "sync_every": 4}, "`overlap` is 4, and a fragment is sent again after"),
        ({"outer": "diloco", "fragments": 2, "compression": "int8"}, "`compression` is `int8`, and fragments"),
        ({"outer": "diloco", "mixing": 1}, "cannot have `1` as `mixing`"),
        ({"fragments": 2}, "`fragments` is an option of `diloco`, and `outer` is `average`"),
        ({"local_from": -1}, "cannot have `-1` as `local_from`"),
        ({"outer": "no_such_module:rule"}, "no_such_module"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options, told):
    with pytest.raises(UsageError, match="hint") as refused:
        strategies.create("local_sgd", **options)
    assert told in str(refused.value)
    if told.startswith("Unknown"):
        assert isinstance(refused.value, UnknownNameError)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algorithm": "dpsdg"}, "Unknown algorithm `dpsdg`"),
        ({"engine": "horovod"}, "Unknown engine `horovod`"),
        ({"topology": "star"}, "Unknown topology `star`"),
        ({"topology": [[0.5, 0.5], [0.5, 0.5]]}, "`topology` is 2 x 2, and the job has 1 processes"),
        (
            {"algorithm": "sgp", "topology": "ring"},
            "`topology` is an option of `dpsgd` and `adpsgd`, and `algorithm` is",
        ),
        ({"probability": 0.5}, "`probability` is an option of `gosgd`, and `algorithm` is `dpsgd`"),
        ({"algorithm": "gosgd", "probability": 1.5}, "cannot have `1.5` as `probability`"),
    ],
)
def test_an_option_of_gossip_that_cannot_work_is_refused(options, told):
    with pytest.raises(UsageError, match="hint") as refused:
        strategies.create("gossip", **options)
    assert told in str(refused.value)


def test_an_outer_optimizer_that_keras_does_not_know_is_refused():
    strategy = tfdist.strategy("local_sgd", outer="diloco", outer_optimizer="sgdd")
    with pytest.raises(UsageError, match="`outer_optimizer` is `sgdd`, which is not an optimizer that Keras knows"):
        fit(strategy, made())


def test_more_fragments_than_variables_are_refused():
    strategy = tfdist.strategy("local_sgd", outer="diloco", fragments=5)
    with pytest.raises(UsageError, match=r"`fragments` is 5, and the model .* has 4 trained variables"):
        fit(strategy, made())
    fit(tfdist.strategy("local_sgd", outer="diloco", fragments=4, sync_every=3), made())


def test_models_that_a_rule_cannot_be_right_for_are_refused():
    class Own(keras.Sequential):
        def train_step(self, data):
            return {}

    model = Own([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(None, "mse")
    with pytest.raises(UsageError, match="without an optimizer, and the rule `slowmo` needs its learning rate"):
        fit(tfdist.strategy("local_sgd", outer="slowmo"), model)
    averaged = made(keras.optimizers.SGD(0.1, use_ema=True))
    with pytest.raises(UsageError, match=r"moving average of the weights .* with the rule `diloco`"):
        fit(tfdist.strategy("local_sgd", outer="diloco"), averaged)


def test_callbacks_of_keras_that_save_within_epochs_are_refused(tmp_path):
    saves = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras", save_freq=2)
    with pytest.raises(UsageError, match="`ModelCheckpoint` within epochs saves the weights of one process"):
        fit(tfdist.strategy("local_sgd"), made(), callbacks=[saves])


def test_backups_without_what_is_remembered_are_refused(tmp_path):
    fit(tfdist.strategy("local_sgd"), made(), callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "kept")])
    for name, options in (("local_sgd", {"outer": "slowmo"}), ("gossip", {})):
        with pytest.raises(UsageError, match="would lack the other state of"):
            backup = keras.callbacks.BackupAndRestore(tmp_path / name)
            fit(tfdist.strategy(name, **options), made(), callbacks=[backup])
