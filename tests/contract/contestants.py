"""Who is held to the contract: each strategy at each number of replicas. A strategy joins by adding its name."""

import contextlib
import functools
import os
import pickle

import keras
import tensorflow as tf

import tfdist
from tfdist.jobs.world import World

# This process may be one of several that run the suite together, each of them all tests: `tests/processes` starts them.
WORLD = World.detect(os.environ)

# Strategies whose processes divide the optimizer's state: the strategy, and its option `shard`.
SHARDED = {
    f"{name}_shard_{shard}": (name, shard)
    for name in ("horovod", "multiworker", "mpi")
    for shard in ("optimizer", "gradients")
}

# Strategies that compute activations again; `tests/test_recomputation.py` holds `single` to some cases.
RECOMPUTING = {f"{name}_recompute": name for name in ("single", "mirrored", "custom", "horovod", "multiworker")}

# The number of stages of a pipeline, whose replicas are its micro-batches, or of that of each process of a job.
PIPELINES = ("pipeline", "pipeline_of_3")
STAGED = {f"{name}_stages": name for name in ("horovod", "multiworker", "mpi")}
STAGES = {"pipeline": 2, "pipeline_of_3": 3, **dict.fromkeys(STAGED, 2)}

# Strategies whose replicas have parts in these proportions.
UNEVEN = {f"{name}_uneven": name for name in ("mirrored", "custom", "horovod", "multiworker", "mpi")}
SPEEDS = {2: "3,1", 3: "5,2,1"}

# `local_sgd`, whose processes begin in lock-step, and never come to train apart.
IN_LOCK_STEP = "local_sgd_in_lock_step"

# However many this job has.
OF_THE_JOB = {
    **dict.fromkeys(("horovod", "multiworker", "mpi", IN_LOCK_STEP, *STAGED, *SHARDED), (WORLD.world_size,)),
    **dict.fromkeys(("horovod_recompute", "multiworker_recompute"), (WORLD.world_size,)),
    **dict.fromkeys(("horovod_uneven", "multiworker_uneven", "mpi_uneven"), (WORLD.world_size,)),
    **dict.fromkeys(("parameter_server", "parameter_server_bsp"), (len(WORLD.tasks_of("worker")),)),
}

REPLICAS = OF_THE_JOB | {
    "single": (1,),
    "mirrored": (1, 2, 3),
    "custom": (1, 2, 3),
    **dict.fromkeys(PIPELINES, (1, 3, 4)),
    "stock_mirrored": (2,),
    "single_recompute": (1,),
    "mirrored_recompute": (2,),
    "custom_recompute": (2,),
    "mirrored_uneven": (2, 3),
    "custom_uneven": (2, 3),
}
# Each way through the code once: alone, copies of the variables, one copy for several replicas.
FEW = OF_THE_JOB | {
    "single": (1,),
    "mirrored": (2,),
    "custom": (2,),
    "pipeline": (3,),
    "stock_mirrored": (2,),
}
# Each process of these has the whole optimizer, or a part of all of its slots.
WITH_ALL_SLOTS = FEW if WORLD.world_size == 1 else FEW | {"pipeline": ()}
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


@contextlib.contextmanager
def in_one_stage():
    """Pipelines that are started meanwhile have one stage, which trains what cannot be cut."""
    before = dict(STAGES)
    STAGES.update(dict.fromkeys(STAGES, 1))
    try:
        yield
    finally:
        STAGES.update(before)


def start(name, replicas, **options):
    """A strategy to train with."""
    if name == "stock_mirrored":
        return StockMirrored(replicas)
    if name in RECOMPUTING:
        name, options["recompute"] = RECOMPUTING[name], "blocks"
    if name in UNEVEN:
        name, options["speeds"] = UNEVEN[name], SPEEDS[replicas]
    if name == IN_LOCK_STEP:
        return tfdist.strategy("local_sgd", **{"seed": 7, "local_from": 10**6} | options)
    if name in SHARDED:
        name, options["shard"] = SHARDED[name]
    if name in STAGED:
        in_parts = {"micro_batches": 2, "balance": "memory"} if STAGES[name] > 1 else {}
        name, options = STAGED[name], {"stages": STAGES[name]} | in_parts | options
    if name in ("parameter_server", "parameter_server_bsp"):
        # With another staleness, or in another mode, a result depends on the moment.
        options |= {"staleness": 0} if name == "parameter_server" else {"mode": "bsp"}
        name = "parameter_server"
        options["shard_bytes"] = 0  # where there are several servers, each has a part of every variable
    elif name in PIPELINES:  # to measure times would take longer than the tests
        where = {"devices": STAGES[name]} if WORLD.world_size == 1 else {}  # or a stage in each process of the job
        options = where | {"micro_batches": replicas, "balance": "memory"} | options
        name = "pipeline"
    elif name not in OF_THE_JOB:
        options["devices"] = replicas
    strategy = tfdist.strategy(name, **{"seed": 7} | options)
    if name == "pipeline" and WORLD.world_size > 1:
        keras.Model.get_weights = functools.partialmethod(_weights_of_all_stages, strategy)
    return strategy


def _weights_of_all_stages(model, strategy, original=keras.Model.get_weights):
    """`model.get_weights()` in every process, each of which calls it."""
    with strategy.whole_state(model):
        mine = original(model) if strategy.world.is_chief else None
    return pickle.loads(strategy.exchange(pickle.dumps(mine))[0])


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
