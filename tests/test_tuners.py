"""KerasTuner, Optuna, and the trackers' own callbacks, as users write them, with strategies of one process."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.independent]

MODEL = """
import keras
import tfdist

x, y = tfdist.data.load("digits").arrays("train")
x_val, y_val = tfdist.data.load("digits").arrays("validation")

def compiled(strategy, units=16, rate=0.01):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(),
                                  keras.layers.Dense(units, "relu"), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    strategy.prepare(model)
    return model
"""
KERAS_TUNER = """
import keras_tuner

strategies = {
    "mirrored": tfdist.strategy("mirrored", devices=2, seed=1),
    "custom": tfdist.strategy("custom", devices=2, seed=1),
    "single": tfdist.strategy("single", seed=1),
}
used = set()

def build(hp):
    name = hp.Choice("strategy", list(strategies))
    used.add(name)
    return compiled(strategies[name], hp.Int("units", 8, 32, step=8), hp.Choice("rate", [1e-2, 1e-3]))

tuner = keras_tuner.GridSearch(build, objective="val_accuracy", max_trials=24, directory="tuning", overwrite=True)
tuner.search(x[:256], y[:256], batch_size=64, epochs=1, validation_data=(x_val, y_val), verbose=0)
best = tuner.get_best_hyperparameters()[0]
print("used", *sorted(used), "best rate", best["rate"], "trials", len(tuner.oracle.trials))
same = {name: [trial.score for trial in tuner.oracle.trials.values()
               if trial.hyperparameters["strategy"] == name] for name in strategies}
print("equal", all(abs(a - b) < 0.02 for scores in same.values() for a, b in zip(scores, same["single"])))
"""
OPTUNA = """
import optuna

strategy = tfdist.strategy("mirrored", devices=2, seed=1)

class Pruning(keras.callbacks.Callback):
    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["val_accuracy"], epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned()

def objective(trial):
    model = compiled(strategy, rate=trial.suggest_categorical("rate", [1e-2, 1e-5]))
    history = model.fit(x, y, batch_size=64, epochs=3, validation_data=(x_val, y_val), verbose=0,
                        callbacks=[Pruning(trial)])
    return history.history["val_accuracy"][-1]

study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"rate": [1e-2, 1e-5]}, seed=1),
                            pruner=optuna.pruners.ThresholdPruner(lower=0.3))
study.optimize(objective, n_trials=2)
print("states", sorted(trial.state.name for trial in study.trials), "best", study.best_params["rate"])
"""
TRACKED = """
import os
os.environ["WANDB_MODE"] = "offline"
import mlflow
import wandb
from mlflow.tensorflow import MlflowCallback
from wandb.integration.keras import WandbMetricsLogger

strategy = tfdist.strategy("mirrored", devices=2, seed=1)

def trained(callbacks):
    model = compiled(strategy)
    model.fit(x[:256], y[:256], batch_size=64, epochs=2, validation_data=(x_val, y_val), verbose=0,
              callbacks=callbacks)
    return model.get_weights()

expected = trained([])
with mlflow.start_run() as own:
    by_callback = trained([MlflowCallback()])
run = wandb.init(project="digits")
by_wandb = trained([WandbMetricsLogger()])
run.finish()
mlflow.tensorflow.autolog()
by_autolog = trained([])
for weights in (by_callback, by_wandb, by_autolog):
    print("equal", all((a == b).all() for a, b in zip(weights, expected)))
client = mlflow.MlflowClient()
logged = mlflow.last_active_run().info.run_id
for number in (own.info.run_id, logged):
    print("epochs", len(client.get_metric_history(number, "val_loss")))
"""


def run(tmp_path, program):
    (tmp_path / "program.py").write_text(MODEL + program)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kerastuner_chooses_among_strategies_in_a_process(tmp_path):
    pytest.importorskip("keras_tuner", reason="KerasTuner is not installed")
    text = run(tmp_path, KERAS_TUNER)
    assert "used custom mirrored single best rate 0.01 trials 24\n" in text
    assert "equal True\n" in text


def test_optuna_prunes_trials(tmp_path):
    pytest.importorskip("optuna", reason="Optuna is not installed")
    assert "states ['COMPLETE', 'PRUNED'] best 0.01\n" in run(tmp_path, OPTUNA)


def test_callbacks_and_autolog_of_trackers_change_no_weight(tmp_path):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    text = run(tmp_path, TRACKED)
    assert text.count("equal True\n") == 3
    assert text.count("epochs 2\n") == 2
