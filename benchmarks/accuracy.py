"""Test accuracy on Fashion-MNIST with tfdist `custom`: 10 epochs on the 60,000 training examples, mean over seeds.

Adam at 1e-3, float32 pixels in [0, 1]. `--repeats` is the number of seeds.
Example: `python -m benchmarks.accuracy --only mlp`
"""

from __future__ import annotations

import dataclasses
import statistics

from benchmarks import contestants, data, race

CONTESTANTS = {"mlp": "benchmarks.accuracy:train", "cnn": "benchmarks.accuracy:train"}
BATCH_SIZE = {"mlp": 32, "cnn": 128}
TARGET = {"mlp": 0.875, "cnn": 0.905}


def train(job: race.Job, turns: race.Turns) -> None:
    """Trains with `custom`, all epochs in one turn, and reports the accuracy on the test set."""
    import tfdist

    strategy = tfdist.strategy("custom", seed=job.seed)
    with strategy.scope():
        model = contestants.new_model(job)
        contestants.compile_model(model)
    strategy.prepare(model)
    x, y = data.load(job.data, "train", job.examples)
    turns.begin()
    history = model.fit(x, y, batch_size=job.batch_size, epochs=job.epochs, verbose=0)
    _, accuracy = model.evaluate(*data.load(job.data, "test"), batch_size=1000, verbose=0)
    turns.note = str(accuracy)
    turns.end(history.history["loss"][-1], model.optimizer.iterations.numpy())


def accuracies(job: race.Job, seeds: int) -> list[float]:
    """The test accuracy of each seed, each in a separate process."""
    results = []
    for seed in range(seeds):
        worker = race.Worker(job.model, CONTESTANTS[job.model], dataclasses.replace(job, seed=seed))
        answer = worker.turn()
        worker.close()
        assert answer["steps"] == job.steps * job.epochs
        results.append(float(answer["note"]))
        print(f"{job.model} seed {seed}: {results[-1]:.4f} in {answer['seconds']:.1f} s", flush=True)
    return results


def main() -> None:
    parser = race.parser(__doc__, repeats=3)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    models = race.chosen(CONTESTANTS, arguments.only)
    with race.examples(arguments.data_dir) as (folder, real):
        if not real:
            print("The accuracy is meaningful only with the real Fashion-MNIST; pass --data-dir. Nothing was run.")
            return
        for model in models:
            job = race.Job(model, BATCH_SIZE[model], 60_000, epochs=arguments.epochs, data=folder)
            results = accuracies(job, arguments.repeats)
            mean = statistics.mean(results)
            spread = f"{min(results):.4f} to {max(results):.4f}"
            reached = race.verdict(mean >= TARGET[model])
            print(
                f"{model}: test accuracy, mean of {len(results)} seeds {mean:.4f} ({spread}), "
                f"target {TARGET[model]} {reached}"
            )


if __name__ == "__main__":
    main()
