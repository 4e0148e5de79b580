"""The evaluation of a training's checkpoints outside of the training: each once, complete, and until the end."""

import csv
import shutil
import time

import keras
import numpy as np
import pytest
from click.testing import CliRunner

import tfdist
from tfdist import train as command
from tfdist.callbacks import Checkpoint
from tfdist.checkpointing.evaluation import History
from tfdist.checkpointing.follower import Follower
from tfdist.errors import CheckpointError, CheckpointWarning, ClusterError, UsageError
from tfdist.run import evaluator, schema
from tfdist.run.folder import RunFolder

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X[:, :1] - 2 * X[:, 1:2]


def a_model(units=3):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def train(folder, epochs=3, **options):
    """Trains with Keras' own `fit`; returns the validation of each epoch."""
    fitted = a_model().fit(
        X, Y, epochs=epochs, validation_data=(X, Y), verbose=0, callbacks=[Checkpoint(folder, keep=9, **options)]
    )
    return fitted.history


def evaluate(folder, **options):
    return tfdist.evaluate_checkpoints(a_model(), folder, X, Y, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a training of three epochs, and its validation."""
    folder = tmp_path_factory.mktemp("training") / "checkpoints"
    return folder, train(folder)


class TestScript:
    """`tfdist.evaluate_checkpoints`, for a script of the user."""

    def test_each_checkpoint_has_the_numbers_of_the_validation_in_its_epoch(self, trained, tmp_path):
        folder, history = trained
        rows = evaluate(folder, log_dir=tmp_path / "evaluator")
        assert [(row["step"], row["epoch"]) for row in rows] == [(2, 1), (4, 2), (6, 3)]
        for name in ("val_loss", "val_mae"):
            assert [row[name] for row in rows] == pytest.approx(history[name], rel=1e-6)
        with (tmp_path / "evaluator" / "history.csv").open() as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == [2, 4, 6]
        assert list((tmp_path / "evaluator").glob("events.out.tfevents.*"))

    def test_one_that_starts_again_evaluates_only_what_is_new(self, tmp_path):
        train(tmp_path / "checkpoints", epochs=2)
        first = evaluate(tmp_path / "checkpoints")
        assert evaluate(tmp_path / "checkpoints") == first
        train(tmp_path / "checkpoints", epochs=3, resume=True)
        again = evaluate(tmp_path / "checkpoints")
        assert again[:2] == first and [row["epoch"] for row in again] == [1, 2, 3]

    def test_a_damaged_checkpoint_is_left_out(self, trained, tmp_path, monkeypatch):
        monkeypatch.setattr("tfdist.checkpointing.evaluation.SECONDS_TO_COMPLETE", 0.1)
        shutil.copytree(trained[0], tmp_path / "checkpoints")
        second = tmp_path / "checkpoints" / "step-00000004.ckpt"
        second.write_bytes(second.read_bytes()[:-40])
        with pytest.warns(CheckpointWarning, match="its checksum is wrong, so it was truncated or altered; it is not"):
            assert [row["step"] for row in evaluate(tmp_path / "checkpoints")] == [2, 6]

    def test_another_model_is_refused(self, trained, tmp_path):
        with pytest.raises(CheckpointError, match=r"is of another model(?s:.*)give the evaluator the model"):
            tfdist.evaluate_checkpoints(a_model(units=2), trained[0], X, Y, log_dir=tmp_path)

    def test_a_folder_without_checkpoints_ends_it_with_a_sentence(self, tmp_path):
        with pytest.raises(
            ClusterError, match=r"No new checkpoint has appeared in `.*nowhere`(?s:.*)shares with"
        ) as caught:
            evaluate(tmp_path / "nowhere", log_dir=tmp_path, seconds=0.1)
        assert caught.value.exit_code == 3


class TestFollower:
    def test_checkpoints_come_in_the_order_of_their_steps_and_once(self, tmp_path):
        for name in ("step-00000100.ckpt", "step-00000009.ckpt", ".step-00000200.ckpt.x.ckpt", "step-a.ckpt"):
            (tmp_path / name).write_text(name)
        follower = Follower(tmp_path, tmp_path / "kept")
        assert [follower.next().name for _ in range(2)] == ["step-00000009.ckpt", "step-00000100.ckpt"]
        assert follower.next() is None

    def test_a_deleted_one_is_kept_until_it_is_released(self, tmp_path):
        (tmp_path / "step-00000001.ckpt").write_text("content")
        (tmp_path / "step-00000002.ckpt").write_text("content")
        follower = Follower(tmp_path, tmp_path / "kept")
        first = follower.next()
        for path in tmp_path.glob("step-*"):
            path.unlink()
        second = follower.next()
        assert first.read_text() == second.read_text() == "content"
        follower.release(first)
        follower.close()
        assert not (tmp_path / "kept").exists()

    def test_a_training_that_deletes_its_checkpoints_meanwhile_loses_none(self, tmp_path):
        follower = Follower(tmp_path, tmp_path / "kept").start()
        for step in (1, 2, 3):
            path = tmp_path / f"step-0000000{step}.ckpt"
            path.write_text("content")
            while not (tmp_path / "kept" / path.name).exists():
                time.sleep(0.01)
            path.unlink()
        assert [follower.next().name for _ in range(3)] == [f"step-0000000{step}.ckpt" for step in (1, 2, 3)]
        follower.close()

    def test_without_hard_links_the_file_itself_is_read(self, tmp_path, monkeypatch):
        def refuse(source, target):
            raise PermissionError

        monkeypatch.setattr("os.link", refuse)
        (tmp_path / "step-00000001.ckpt").write_text("content")
        follower = Follower(tmp_path, tmp_path / "kept")
        path = follower.next()
        assert path == tmp_path / "step-00000001.ckpt"
        follower.release(path)
        assert path.exists()


class TestEnd:
    """When the evaluator of `tfdist train` ends, as `run.json` has it."""

    @pytest.fixture
    def write(self, tmp_path):
        chief = RunFolder(tmp_path / "run")

        def write(status, reason=None):
            chief.write(schema.example().model_copy(update={"status": status, "reason": reason}))

        return write

    @pytest.fixture
    def training(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TFDIST_START_SECONDS", "0.05")
        monkeypatch.setenv("TFDIST_EVALUATOR_SECONDS", "0.05")

        def make(resumed=False):
            folder = RunFolder(tmp_path / "run", resume=True, evaluator=0)
            folder.end_following()
            history = History(folder.history, tmp_path / "board")
            return evaluator.Training(folder, history, resumed)

        return make

    @pytest.mark.parametrize("status", ["completed", "stopped"])
    def test_a_training_that_has_ended_well_ends_it(self, status, write, training):
        write("running")
        followed = training()
        assert not followed.ended(0.0)
        write(status)
        assert followed.ended(0.0)

    def test_a_training_that_is_resumed_has_not_ended(self, write, training):
        write("completed")
        followed = training(resumed=True)
        assert not followed.ended(0.0)
        write("running")
        assert not followed.ended(0.0)
        write("completed")
        assert followed.ended(0.0)

    def test_a_training_that_has_failed_may_be_restarted(self, write, training):
        write("failed", "worker 1 was killed")
        followed = training()
        assert not followed.ended(0.0)
        write("running")
        assert not followed.ended(0.0)
        write("failed", "worker 1 was killed")
        assert not followed.ended(0.0)
        time.sleep(0.15)
        with pytest.raises(ClusterError, match=r"has ended as `failed`(?s:.*)worker 1 was killed(?s:.*)`--resume`"):
            followed.ended(0.15)

    def test_a_training_that_is_dead_ends_it(self, write, training):
        write("running")
        followed = training()
        assert not followed.ended(0.0)
        time.sleep(0.1)
        with pytest.raises(ClusterError, match="No new checkpoint has appeared"):
            followed.ended(10.0)

    def test_a_folder_that_is_not_shared_ends_it(self, training):
        followed = training()
        assert not followed.ended(0.0)
        time.sleep(0.15)
        with pytest.raises(ClusterError, match=r"there is no run in(?s:.*)shares with the chief"):
            followed.ended(0.15)


ENVIRONMENT = {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}}'}
GIVEN = ("--strategy", "multiworker", "--model", "mlp", "--dataset", "digits")


class TestCommand:
    """What `tfdist train` refuses in an evaluator."""

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ((), "TF_CONFIG makes this process evaluator 0, and `--run-dir` is not set"),
            (("--run-dir", "r", "--verify-steps", "2"), "a verification makes no checkpoints to evaluate"),
        ],
    )
    def test_it_needs_a_run_to_follow(self, options, says):
        done = CliRunner(env=ENVIRONMENT).invoke(command.command, [*GIVEN, *options])
        assert done.exit_code == 2 and says in done.output

    def test_a_strategy_that_trains_in_the_job_is_refused(self, monkeypatch):
        monkeypatch.setenv("TF_CONFIG", ENVIRONMENT["TF_CONFIG"])
        with pytest.raises(UsageError, match="makes this process evaluator 0, which takes no part in the training"):
            tfdist.strategy("multiworker")
        assert tfdist.strategy("single").num_replicas == 1
