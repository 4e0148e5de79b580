"""`parameter_server`: `tf.distribute.ParameterServerStrategy`, one copy of the variables, on servers. For workers whose
speed differs, or that come and go.

    chief     runs the user's program, and schedules the steps       (the coordinator)
    worker    computes the next step as soon as it is free
    ps        stores some of the variables, and updates them

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from tfdist.data_parallel.tf_distribute import TensorFlowVariables
from tfdist.errors import UsageError
from tfdist.interface.traits import Traits
from tfdist.options import Count, Fraction, Seconds
from tfdist.parameter_server.modes import Mode
from tfdist.parameter_server.strategy import ServedStrategy

# A table of a million rows is spread over the servers; a layer of a usual size, which each step reads whole, is not.
SHARD_BYTES = 8 << 20


class ParameterServerStrategy(ServedStrategy):
    """Trains on the workers of a job, with the variables on its parameter servers.

    Every process of the job runs the same program and makes the strategy. On the chief the constructor returns, and the
    program continues; a worker or a parameter server serves the chief until the chief ends, and exits.

    In the mode "asp" each step runs on one worker, on a whole batch, with the current values of the variables: steps do
    not wait for each other. The staleness of a step is the number of updates by other workers between its reads and its
    own update. The other modes are listed in `tfdist.parameter_server.modes`.

    Args:
        mode: what workers do with the weights on the servers, and when: "asp", "rounds", "ssp", "bsp", "downpour",
            "easgd" or "eamsgd"; default: "rounds" if `staleness` is set, otherwise "asp".
        staleness: for `rounds`, the largest staleness of a step: with 0 the steps run one after the other, and the
            result is that of one device. For `ssp`, the number of steps that a worker may be ahead of the slowest (Ho
            et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013).
            Default: 3.
        push_every: for `downpour`, the number of steps between pushes of changes; default: 10.
        fetch_every: for `downpour`, the number of steps between fetches of the weights; default: 10.
        sync_every: for `easgd` and `eamsgd`, the number of a worker's steps between exchanges with the centre;
            default: 10.
        moving_rate: for `easgd` and `eamsgd`, the fraction of their distance by which worker and centre move towards
            each other; default: 0.9 divided by the number of workers.
        momentum: for `eamsgd`; default: 0.99.
        shard_bytes: the rows of larger variables are spread over the servers.
        timeout_seconds: how long to wait for a silent process. Then the steps of a worker are given to another; without
            the chief, or a parameter server, the job ends.
        start_timeout_seconds: how long the start waits for all processes; `None` uses the launcher's setting or 60.
        job_settings: settings that must be the same in all processes, as the versions of packages must.
        options: see `tfdist.strategies.base.Strategy`.

    Raises:
        UsageError: the job has no chief or no parameter servers, or TensorFlow has already started.
        ClusterError: a process is missing, or has other versions or settings.
    """

    name = "parameter_server"

    def __init__(
        self,
        *,
        mode: str | None = None,
        staleness: int | None = None,
        push_every: Count | None = None,
        fetch_every: Count | None = None,
        sync_every: Count | None = None,
        moving_rate: Annotated[float, Field(ge=0, le=1)] | None = None,
        momentum: Fraction | None = None,
        shard_bytes: int = SHARD_BYTES,
        timeout_seconds: Seconds = 60.0,
        start_timeout_seconds: Seconds | None = None,
        job_settings: Mapping[str, str] | None = None,
        **options: Any,
    ):
        if staleness is not None and staleness < 0:
            raise UsageError(f"`staleness` is {staleness}", "use 0 or more, or leave it out for no bound")
        mode_options = {
            "staleness": staleness,
            "push_every": push_every,
            "fetch_every": fetch_every,
            "sync_every": sync_every,
            "moving_rate": moving_rate,
            "momentum": momentum,
        }
        super().__init__(
            Mode(mode, mode_options),
            shard_bytes=shard_bytes,
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
            job_settings=job_settings,
            **options,
        )

    def set_up(self) -> None:
        super().set_up()
        self.variables = TensorFlowVariables(self._tf_strategy, self.name)


STRATEGY = ParameterServerStrategy
TRAITS = Traits(
    processes=True,
    servers=True,
    asynchronous=True,
)
