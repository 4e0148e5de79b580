"""`python -m tfdist.train`: trains a model on a dataset with a strategy, and leaves a run folder.

This module alone knows every room. Nothing slow is imported until the options have been checked:

    parse → TrainConfig → RunFolder → (TensorFlow) strategy → data → model → fit → evaluate → record → table
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import psutil

from tfdist import data, models, registry, startup, strategies, terminal
from tfdist.cluster import job_environment, process_exit
from tfdist.cluster.world import World
from tfdist.data.pipeline import augmentation
from tfdist.errors import EXIT_INTERRUPTED, TfdistError, UsageError
from tfdist.launcher import job
from tfdist.launcher.elastic_options import ElasticWishes, elastic_options
from tfdist.run import config as configs
from tfdist.run import recipes

if TYPE_CHECKING:
    from tfdist.run.config import TrainConfig
    from tfdist.run.record import RunFolder, RunRecord
    from tfdist.run.session import Session

EXIT_UNEXPECTED = 1
# The strategies that need a package of their own, and the communicator that says how to install it.
ENGINES = {"horovod": ("horovod", "horovod"), "mpi_split": ("mpi4py", "mpi")}


def _names(found: list[str] | tuple[str, ...], own: bool = False) -> str:
    return ", ".join(found) + (", or your own as module:function" if own else "")


def _take_recipe(context: click.Context, option: click.Parameter, name: str | None) -> None:
    """Makes the options of a recipe the defaults of the others."""
    del option
    if name is None:
        return
    try:
        context.default_map = recipes.load(name)
    except TfdistError as error:
        click.echo(f"error: {error}", err=True)
        context.exit(error.exit_code)


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        # `--batch_size` is `--batch-size`; names of models and modules stay as they are.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    }
)
@click.option(
    "--recipe",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_take_recipe,
    help="these options, where no others are given: " + _names(recipes.names()),
)
@click.option("--strategy", required=True, metavar="NAME", help=_names(strategies.names()))
@click.option("--model", required=True, metavar="NAME", help=_names(models.names(), own=True))
@click.option("--dataset", required=True, metavar="NAME", help=_names(data.names(), own=True))
@click.option("--epochs", type=int, default=5, show_default=True, help="passes over the training examples")
@click.option("--batch-size", type=int, default=32, show_default=True, help="examples in a global batch")
@click.option("--model-option", multiple=True, metavar="NAME=VALUE", help="what the model is told; often as needed")
@click.option("--optimizer", metavar="NAME", help="the model's own if not given; " + _names(configs.OPTIMIZERS))
@click.option("--learning-rate", type=float, help="the model's own if not given")
@click.option("--momentum", type=float, help="likewise")
@click.option("--weight-decay", type=float, help="likewise")
@click.option("--schedule", default="constant", show_default=True, metavar="NAME", help=_names(configs.SCHEDULES))
@click.option("--warmup-epochs", type=float, default=0.0, help="in which the learning rate rises from 0")
@click.option(
    "--dtype-policy", default="float32", show_default=True, metavar="NAME", help=_names(configs.DTYPE_POLICIES)
)
@click.option("--gradient-accumulation", type=int, default=1, show_default=True, help="batches to an update")
@click.option("--compression", metavar="NAME", help="of gradients between processes: none, bf16; or fp16, of horovod")
@click.option("--staleness", type=int, metavar="S", help="bound on the updates between a step's reading and its own")
@click.option("--shard-bytes", type=int, metavar="N", help="spread larger variables over the parameter servers")
@click.option("--sync-every", metavar="epoch|N", help="average the weights of mpi_split after so many steps")
@click.option("--timeline", type=click.Path(path_type=Path), help="write the timeline of all ranks there, of horovod")
@click.option("--timeout-seconds", type=float, metavar="S", help="how long a process waits for the others in a step")
@click.option("--callback-timeout-seconds", type=float, metavar="S", help="how long one may be busy while others wait")
@click.option("--workers", type=int, metavar="N", help="start so many processes on this machine")
@click.option("--ps", type=int, metavar="N", help="and so many parameter servers")
@elastic_options
@click.option("--hostfile", type=click.Path(path_type=Path), help="watched by an elastic job: lines `host slots=2`")
@click.option("--restarts", type=int, default=0, show_default=True, help="start them again so often after a failure")
@click.option("--expose", is_flag=True, help="leave them in this machine's network, open to others")
@click.option("--devices", metavar="N|NAMES", help="how many, or which, as in GPU:0,GPU:1")
@click.option("--seed", type=int, default=0, show_default=True, help="of weights, order and random layers")
@click.option("--limit", type=int, metavar="N", help="only the first N training examples")
@click.option("--data-dir", type=click.Path(path_type=Path), help="where the dataset's files lie")
@click.option("--data-option", multiple=True, metavar="NAME=VALUE", help="what the dataset is told; often as needed")
@click.option("--augment", default="none", show_default=True, metavar="NAME", help=_names(augmentation.NAMES))
@click.option("--on-bad-example", metavar="NAME", help="a file or line that cannot be used: fail, skip")
@click.option("--run-dir", type=click.Path(path_type=Path), help="the run's folder; below runs/ if not given")
@click.option("--resume", is_flag=True, help="go on with the run in --run-dir")
@click.option("--checkpoint-steps", type=int, metavar="N", help="save after so many steps too, not only each epoch")
@click.option("--target-accuracy", type=float, metavar="SHARE", help="stop at this validation accuracy")
@click.option("--tensorboard", is_flag=True, help="write TensorBoard logs")
@click.option("--profile", metavar="FIRST:LAST", help="trace these training steps, LAST excluded")
@click.option("--quiet", is_flag=True, help="show nothing but errors")
@click.option("--verbose", is_flag=True, help="show TensorFlow's messages too")
def command(
    devices: str | None,
    profile: str | None,
    sync_every: str | None,
    data_option: tuple[str, ...],
    model_option: tuple[str, ...],
    workers: int | None,
    ps: int | None,
    restarts: int,
    expose: bool,
    elastic: bool,
    min_workers: int | None,
    max_workers: int | None,
    hostfile: Path | None,
    host_discovery_script: Path | None,
    **options: Any,
) -> None:
    """Train a model on a dataset with a strategy."""
    try:
        config = configs.TrainConfig(
            **options,
            devices=None if devices is None else configs.parse_devices(devices),
            profile=None if profile is None else configs.parse_range(profile),
            sync_every=int(sync_every) if sync_every and sync_every.isdigit() else sync_every,
            data_options=registry.parse_options(data_option, "--data-option"),
            model_options=registry.parse_options(model_option, "--model-option"),
        )
        world = World.detect()
        counts = {"worker": workers, "ps": ps}
        _check_processes(config, world, counts)
        wishes = ElasticWishes(elastic, min_workers, max_workers, host_discovery_script)
        _check_elastic(config, counts, wishes)
        if hostfile and not elastic:
            raise UsageError("`--hostfile` is set, and the job is not elastic", "start it by `python -m tfdist.launch`")
        several = elastic or any(count is not None for count in counts.values())
        starts = world.world_size == 1 and several and job_environment.JOB not in os.environ
        code = _launch(config, counts, restarts, expose, wishes, hostfile) if starts else run(config, world)
    except TfdistError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code:
        process_exit.fail(code)
    sys.exit(code)


def run(config: TrainConfig, world: World) -> int:
    """Trains as `config` says and returns the exit code.

    Raises:
        TfdistError: before training began; later ones are shown, recorded and returned as their exit code.
    """
    from tfdist.run.record import RunFolder

    run_dir = config.run_dir or _new_run_dir(config, os.environ.get(job_environment.JOB) or job.new_name(world))
    if os.environ.get(job_environment.RESTART, "0") != "0" and run_dir.exists():
        config = dataclasses.replace(config, run_dir=run_dir, resume=True)
    if not world.is_chief:
        config = dataclasses.replace(config, quiet=not config.verbose)
    # One that serves has its log there, and goes on with it when it comes back.
    serves = config.strategy in configs.WITH_SERVERS and not world.is_chief
    path = run_dir if world.is_chief else run_dir / f"rank-{world.rank}"
    folder = RunFolder(path, resume=config.resume or serves)
    with terminal.any_stdout(), terminal.stderr_to(None if config.verbose else folder.log) as stderr:
        show = (lambda *lines: None) if config.quiet else click.echo
        return _reported(config, folder, show, stderr)


def _check_processes(config: TrainConfig, world: World, counts: dict[str, int | None]) -> None:
    able = {"worker": configs.OF_SEVERAL_PROCESSES, "ps": configs.WITH_SERVERS}
    for role, count in counts.items():
        option = "--workers" if role == "worker" else f"--{role}"
        if count is not None and config.strategy not in able[role]:
            raise UsageError(
                f"`{option}` is {count}, and `{config.strategy}` has no use for it",
                "use `--devices`, or one of the strategies " + _names(able[role]),
            )
        there = len(world.tasks_of(role)) if world.tasks else world.world_size
        if count is not None and world.world_size > 1 and count != there:
            raise UsageError(
                f"`{option}` is {count}, and {world.source} has {there}",
                f"leave `{option}` out where the job is described already",
            )
    if world.world_size > 1 and config.strategy not in configs.OF_SEVERAL_PROCESSES:
        raise UsageError(
            f"{world.source} describes {world.world_size} processes, and `{config.strategy}` trains in one",
            "unset it, or use one of the strategies " + _names(configs.OF_SEVERAL_PROCESSES),
        )


def _check_elastic(config: TrainConfig, counts: dict[str, int | None], wishes: ElasticWishes) -> None:
    if wishes.elastic and config.strategy not in configs.ELASTIC:
        raise UsageError(
            f"`--elastic` is set, and the workers of `{config.strategy}` cannot come and go",
            "use one of the strategies " + _names(configs.ELASTIC),
        )
    if wishes.elastic and any(count is not None for count in counts.values()):
        raise UsageError("`--workers` is set beside `--elastic`", "say `--min-workers` and `--max-workers`")


def _launch(
    config: TrainConfig,
    counts: dict[str, int | None],
    restarts: int,
    expose: bool,
    wishes: ElasticWishes,
    hostfile: Path | None,
) -> int:
    """Starts this same command in several processes."""
    from tfdist.launcher import elastic
    from tfdist.launcher import run as launcher

    _require_engine(config.strategy)
    members = wishes.members(hostfile) if wishes.elastic else None

    name = job.new_name()
    run_dir = config.run_dir or _new_run_dir(config, name)
    wanted = job.Job(
        command=("-m", "tfdist.train", *_arguments(), *(() if config.run_dir else ("--run-dir", str(run_dir)))),
        workers=2 if counts["worker"] is None else counts["worker"],
        ps=int(config.strategy in configs.WITH_SERVERS) if counts["ps"] is None else counts["ps"],
        mpi=config.strategy in configs.BY_MPI,
        restarts=restarts,
        expose=expose,
        log_dir=run_dir / "output",
        verbose=config.verbose,
        name=name,
    )
    # The job may get a network in which nothing can be fetched.
    options = [f"{name}={value!r}" for name, value in config.load_options.items()]
    fetching = [sys.executable, "-m", "tfdist.data.tools.fetch", config.dataset, str(config.data_dir or ""), *options]
    fetched = subprocess.run(fetching, check=False, stderr=None)
    if fetched.returncode:
        return fetched.returncode
    return launcher.run(wanted) if members is None else elastic.run(wanted, members)


def _require_engine(strategy: str) -> None:
    """Says that a package is missing before processes are started that would each say so."""
    package, communicator = ENGINES.get(strategy, (None, None))
    if package is not None and importlib.util.find_spec(package) is None:
        importlib.import_module(f"tfdist.communicators.{communicator}").load()


def _reported(config: TrainConfig, folder: RunFolder, show: Callable[..., None], stderr: TextIO) -> int:
    """Runs the session and says, on the terminal and in the record, how it ended."""
    session: Session | None = None
    try:
        startup.require_tensorflow_backend()
        from tfdist.run.session import Session

        session = Session(config, folder, _command(), _process_start(), show)
        close = functools.partial(_close, session, stderr)
        with terminal.noticed_interrupts(session.interrupt), process_exit.closed_by(close):
            record = _run(session)
    except TfdistError as error:
        _close(session, stderr, "failed", error.sentence)
        click.echo(f"error: {error}", file=stderr)
        return error.exit_code
    except KeyboardInterrupt:
        _close(session, stderr, "interrupted", "Ctrl-C")
        return EXIT_INTERRUPTED
    except Exception as error:
        _close(session, stderr, "failed", f"{type(error).__name__}: {error}")
        traceback.print_exc()
        if not config.verbose:
            traceback.print_exc(file=stderr)
        click.echo(f"error: unexpected {type(error).__name__}; the log is {folder.log}", file=stderr)
        return EXIT_UNEXPECTED
    if not config.quiet:
        _print_table(record, folder)
    return 0


def _run(session: Session) -> RunRecord:
    try:
        return session.run()
    except Exception:
        # Of processes that are interrupted together one may end first; that the others miss it is no failure.
        session.raise_if_interrupted()
        raise


def _close(session: Session | None, stderr: TextIO, status: Any, reason: str) -> None:
    """Writes how the run ended, unless it had ended already; `stderr` may be gone."""
    if session is None or (session.record is not None and session.record.status != "running"):
        return
    session.close(status, reason)
    if session.record is not None and status == "interrupted":
        with contextlib.suppress(OSError):
            click.echo(f"Interrupted; go on with `--resume --run-dir {session.folder.path}`", file=stderr)


def _print_table(record: RunRecord, folder: RunFolder) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _summary(record, folder):
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)


def _summary(record: RunRecord, folder: RunFolder) -> list[tuple[str, str]]:
    test = record.test_metrics or {}
    rows = [(f"test {name}", f"{value:.4f}") for name, value in sorted(test.items()) if value is not None]
    # The first epoch includes the building of the graph; it counts only where there is no other.
    epochs = record.epochs[1:] or record.epochs
    seconds = sum(epoch.train_seconds or 0 for epoch in epochs)
    examples = sum((epoch.examples_per_second or 0) * (epoch.train_seconds or 0) for epoch in epochs)
    if seconds and examples:
        rows.append(("examples/s", f"{examples / seconds:,.0f}"))
    total = sum(epoch.train_seconds or 0 for epoch in record.epochs)
    rows.append(("training time", f"{total:.1f} s in {len(record.epochs)} epochs"))
    if record.time_to_target is not None:
        reached = record.time_to_target.seconds
        goal = f"{record.time_to_target.monitor} {record.time_to_target.target:g}"
        rows.append((f"time to {goal}", "not reached" if reached is None else f"{reached:.1f} s"))
    if record.peak_memory_bytes:
        rows.append(("peak memory", f"{record.peak_memory_bytes / 2**20:,.0f} MiB"))
    return [*rows, ("files", str(folder.path))]


def _new_run_dir(config: TrainConfig, job_name: str) -> Path:
    names = [name.replace(":", ".") for name in (config.model, config.dataset, config.strategy)]
    return Path("runs") / "-".join([*names, job_name])


def _arguments() -> list[str]:
    return sys.argv[1 + (sys.argv[1:2] == ["train"]) :]


def _command() -> list[str]:
    return ["tfdist", "train", *_arguments()]


def _process_start() -> datetime:
    return datetime.fromtimestamp(psutil.Process().create_time(), UTC)


def main() -> None:
    """The command; a misused option ends with exit code 2."""
    command(prog_name="python -m tfdist.train")


if __name__ == "__main__":
    main()
