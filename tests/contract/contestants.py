"""Who is held to the contract: each strategy at each number of replicas. A strategy joins by adding its name."""

import contextlib
import os

import tensorflow as tf

import tfdist
from tfdist.cluster.world import World

# This process may be one of several that run the suite together, each of them all tests: `tests/processes` starts them.
WORLD = World.detect(os.environ)

# Strategies whose processes divide the optimizer's state: the strategy, and its option `shard`.
SHARDED = {
    f"{name}_shard_{shard}": (name, shard)
    for name in ("horovod", "multiworker")
    for shard in ("optimizer", "gradients")
}

# Strategies that compute activations again; `make test` holds `single` to some cases in `tests/test_recomputation.py`.
RECOMPUTING = {f"{name}_recompute": name for name in ("single", "mirrored", "custom", "horovod", "multiworker")}

# However many this job has.
OF_THE_JOB = {
    **dict.fromkeys(("horovod", "multiworker", *SHARDED), (WORLD.world_size,)),
    **dict.fromkeys(("horovod_recompute", "multiworker_recompute"), (WORLD.world_size,)),
    "parameter_server": (len(WORLD.tasks_of("worker")),),
}

REPLICAS = OF_THE_JOB | {
    "single": (1,),
    "mirrored": (1, 2, 3),
    "custom": (1, 2, 3),
    "pipeline": (3,),
    "stock_mirrored": (2,),
    "single_recompute": (1,),
    "mirrored_recompute": (2,),
    "custom_recompute": (2,),
}
# Each way through the code once: alone, copies of the variables, one copy for several replicas.
FEW = OF_THE_JOB | {
    "single": (1,),
    "mirrored": (2,),
    "custom": (2,),
    "pipeline": (3,),
    "stock_mirrored": (2,),
}
# What arrives at a step does not depend on where the variables are: whole batches, and parts of batches.
WHOLE_AND_PARTS = OF_THE_JOB | {"single": (1,), "custom": (2,)}
# Whole batches, halves and thirds.
EACH_COUNT = OF_THE_JOB | {
    "single": (1,),
    "mirrored": (2, 3),
    "custom": (2, 3),
    "pipeline": (3,),
    "stock_mirrored": (2,),
}


def among(replicas):
    """Marks a test that only some contestants need to pass, since it would tell nothing new of the others."""

    def mark(test):
        test.replicas = replicas
        return test

    return mark


def chosen(config, replicas=REPLICAS):
    """The (name, replicas) pairs that the command line asks for."""
    names = config.getoption("--strategies").split(",")
    return [(name, count) for name in names for count in replicas.get(name, ())]


STAGES = 2  # of a pipeline; its number of replicas is that of its micro-batches


@contextlib.contextmanager
def in_one_stage():
    """Pipelines that are started meanwhile have one stage, which trains what cannot be cut."""
    global STAGES
    before, STAGES = STAGES, 1
    try:
        yield
    finally:
        STAGES = before


def start(name, replicas, **options):
    """A strategy to train with."""
    if name == "stock_mirrored":
        return StockMirrored(replicas)
    if name in RECOMPUTING:
        name, options["recompute"] = RECOMPUTING[name], "blocks"
    if name in SHARDED:
        name, options["shard"] = SHARDED[name]
    if name == "parameter_server":
        options["staleness"] = 0  # with more than that a result depends on the moment
        options["shard_bytes"] = 0  # where there are several servers, each has a part of every variable
    elif name == "pipeline":  # two stages; to measure times would take longer than the tests
        options = {"devices": STAGES, "micro_batches": replicas, "balance": "memory"} | options
    elif name not in OF_THE_JOB:
        options["devices"] = replicas
    return tfdist.strategy(name, **{"seed": 7} | options)


class StockMirrored:
    """Keras' own `fit` under TensorFlow's `MirroredStrategy`, to see what it promises less."""

    def __init__(self, replicas):
        self._strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])

    def scope(self):
        return self._strategy.scope()

    def fit(self, model, *args, **kwargs):
        return model.fit(*args, **kwargs)

    def evaluate(self, model, *args, **kwargs):
        return model.evaluate(*args, **kwargs)

    def predict(self, model, *args, **kwargs):
        return model.predict(*args, **kwargs)


@contextlib.contextmanager
def working_folder(path):
    """Relative paths are below `path` meanwhile."""
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)
