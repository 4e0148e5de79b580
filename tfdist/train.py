"""`python -m tfdist.train`: trains a model on a dataset with a strategy, and writes a run folder.

Nothing slow is imported until the options have been checked:

    parse → TrainConfig → RunFolder → (TensorFlow) strategy → data → model → fit → evaluate → record → table

With several processes, the command starts itself in each of them, as a job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import psutil

from tfdist import data, extras, models, redaction, registry, startup, strategies, terminal
from tfdist.command_line import mistakes
from tfdist.data.input import augmentation
from tfdist.errors import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ClusterError,
    MissingPackageError,
    TfdistError,
    UsageError,
    VerificationError,
)
from tfdist.jobs import job_environment, process_exit
from tfdist.jobs.world import World
from tfdist.launcher import job
from tfdist.launcher.elastic import ElasticOptions, elastic_options
from tfdist.run import config as configs
from tfdist.run import recipes, resuming

if TYPE_CHECKING:
    from tfdist.run.config import TrainConfig
    from tfdist.run.folder import RunFolder
    from tfdist.run.schema import RunRecord, UtilizationRecord
    from tfdist.run.session import Session

EXIT_UNEXPECTED = 1
COMMAND = "tfdist.command"  # where the click context has the complete arguments of a resumed run
VERIFY_STEPS = 3  # default of `tfdist verify`


def _names(names: list[str] | tuple[str, ...], reference: str = "") -> str:
    return ", ".join(names) + (f", or your own as module:{reference}" if reference else "")


def _take_recipe(context: click.Context, option: click.Parameter, name: str | None) -> None:
    """Makes the options of a recipe the defaults of the command's options."""
    del option
    if name is None:
        return
    context.default_map = {**(context.default_map or {}), **recipes.load(name)}


_data = terminal.options_of("Data")
_model = terminal.options_of("Model")
_optimisation = terminal.options_of("Optimisation")
_strategy = terminal.options_of("Strategy")
_processes = terminal.options_of("Processes")
_run_option = terminal.options_of("Run")


def _strategy_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of `STRATEGY_FLAGS`, with the help that the docstrings of the strategies have for them."""
    for name, metavar in reversed(configs.STRATEGY_FLAGS.items()):
        owners: dict[str, list[str]] = {}
        for strategy in strategies.taking(name):
            owners.setdefault(strategies.signature(strategy).options[name].help, []).append(strategy)
        text = "; ".join(f"{', '.join(names)}: {help_}" for help_, names in owners.items())
        command = _strategy(f"--{name.replace('_', '-')}", metavar=metavar, help=text)(command)
    return command


EXAMPLES = """\b
Examples:
  python -m tfdist.train --strategy mirrored --model cnn --dataset fashion_mnist
  python -m tfdist.train --strategy multiworker --model cnn --dataset digits --workers 2
  python -m tfdist.train --strategy custom --recipe fashion_mnist-cnn
"""


class _TrainCommand(terminal.Command):
    """A command that, with `--resume`, takes missing options from the run that it continues."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with mistakes.as_sentences(ctx, tuple(args)):
            options = self._options_of_resumed_run(ctx, args)
        if options:
            ctx.meta[COMMAND] = complete = resuming.as_arguments(options, self.params)
            args = [*complete, "--resume", *self._parse(ctx, args)[1]]  # with what is no option, which click refuses
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except SystemExit as error:
            if error.code:  # other processes of the job may be waiting for this process
                process_exit.fail(error.code if isinstance(error.code, int) else 1)
            raise

    def _options_of_resumed_run(self, ctx: click.Context, args: Sequence[str]) -> dict[str, Any]:
        """All options of a run that is resumed, as text; empty without `--resume`."""
        if "--resume" not in args:
            return {}
        typed, _ = self._parse(ctx, args)
        if not typed.get("resume") or typed.get("help"):
            return {}
        configs.require_run_to_resume(True, typed.get("run_dir"))
        from tfdist.run import folder

        run_dir = Path(typed["run_dir"])
        if typed.get("strategy") and not os.path.lexists(run_dir / folder.RECORD):
            folder.require_run_or_its_start(run_dir)
            return {}  # the run ended before it wrote a record
        recorded, _ = self._parse(ctx, folder.load_record(run_dir).command[2:])
        _refuse_missing_secrets(recorded, given=typed)
        for name in ("resume", "run_dir", "help"):
            recorded.pop(name, None)
            typed.pop(name, None)
        options = resuming.merged(_with_recipe(recorded), _with_recipe(typed))
        resuming.require_typed(run_dir, options, typed, self.params)
        return options | {"run_dir": str(run_dir)}

    def _parse(self, ctx: click.Context, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The values of the options in `args`, as text, and the other arguments."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        return parser.parse_args(list(args))[:2]


def _with_recipe(options: dict[str, Any]) -> dict[str, Any]:
    """Replaces the option `recipe` by the options of the recipe."""
    others = {name: value for name, value in options.items() if name != "recipe"}
    return (recipes.load(options["recipe"]) if options.get("recipe") else {}) | others


def _refuse_missing_secrets(earlier: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises `UsageError` if the record of the run to resume leaves out a value of an option that is not given."""
    for name, value in earlier.items():
        if name not in given and redaction.HIDDEN in str(value):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"The record of the run to resume has no secret values, and leaves out one of `{option}`",
                f"set `{option}` again, as often as at the start of the run",
            )


@click.command(
    cls=_TrainCommand,
    epilog=EXAMPLES,
)
@_data("--dataset", required=True, metavar="NAME", help=_names(data.names(), reference="function"))
@_data("--data-option", multiple=True, metavar="NAME=VALUE", help="an option of the dataset; may be repeated")
@_data("--data-dir", type=click.Path(path_type=Path), metavar="FOLDER", help="folder of the dataset's files")
@_data("--limit", type=int, metavar="N", help="train on the first N examples only")
@_data("--augment", default="none", show_default=True, metavar="NAME", help=_names(augmentation.NAMES))
@_data("--on-bad-example", metavar="NAME", help="what to do with a file or line that cannot be used: fail, skip")
@_data(
    "--input",
    default="real",
    show_default=True,
    metavar="NAME",
    help="input of training: real, cached (read once into memory), synthetic (one repeated batch)",
)
@_model("--model", required=True, metavar="NAME", help=_names(models.names(), reference="function"))
@_model("--model-option", multiple=True, metavar="NAME=VALUE", help="an option of the model; may be repeated")
@_model("--dtype-policy", default="float32", show_default=True, metavar="NAME", help=_names(configs.DTYPE_POLICIES))
@_optimisation("--epochs", type=int, default=5, show_default=True, help="passes over the training examples")
@_optimisation("--batch-size", type=int, default=32, show_default=True, help="examples per global batch")
@_optimisation(
    "--optimizer", metavar="NAME", help=_names(configs.OPTIMIZERS) + "; by default the model's usual optimizer"
)
@_optimisation(
    "--learning-rate", type=float, help="by default the usual rate of the model, scaled to the batch (docs/models.md)"
)
@_optimisation("--momentum", type=float, help="momentum of sgd; by default the usual value for the model")
@_optimisation(
    "--weight-decay", type=float, help="with sgd L2 regularization; by default the usual value for the model"
)
@_optimisation("--schedule", default="constant", show_default=True, metavar="NAME", help=_names(configs.SCHEDULES))
@_optimisation(
    "--warmup-epochs",
    type=float,
    help="epochs in which the learning rate rises from 0; by default a tenth of the epochs, at most 5, for a batch "
    "above the model's reference batch",
)
@_optimisation("--gradient-accumulation", type=int, default=1, show_default=True, help="batches per update")
@_optimisation("--seed", type=int, default=0, show_default=True, help="seed of weights, order and random layers")
@_optimisation("--target-accuracy", type=float, metavar="FRACTION", help="stop at this validation accuracy")
@_strategy("--strategy", required=True, metavar="NAME", help=_names(strategies.names(), reference="Class"))
@_strategy("--strategy-option", multiple=True, metavar="NAME=VALUE", help="an option of the strategy; may be repeated")
@_strategy("--devices", metavar="N|NAMES", help="number or names of the devices per process, such as GPU:0,GPU:1")
@_strategy_flags
@_processes("--workers", type=int, metavar="N", help="number of processes to start on this machine")
@_processes("--ps", type=int, metavar="N", help="number of parameter servers to start on this machine")
@elastic_options
@_processes(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="hosts of an elastic job, with a line `host slots=2` per host; changes take effect",
)
@_processes(
    "--restarts", type=int, default=0, show_default=True, metavar="N", help="restarts of the job after a failure"
)
@_processes("--expose", is_flag=True, help="do not isolate the job's network")
@_processes("--on", default="", metavar="ray", help="start the processes on a Ray cluster")
@_run_option(
    "--recipe",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_take_recipe,
    help="take the defaults of the options from a recipe: " + _names(recipes.names()),
)
@_run_option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="folder of the run; a new one in runs/ by default",
)
@_run_option("--resume", is_flag=True, help="continue the run in --run-dir with its options, unless overridden here")
@_run_option(
    "--checkpoint-steps", type=int, metavar="N", help="save a checkpoint every N steps, and at the end of each epoch"
)
@_run_option("--tensorboard", is_flag=True, help="write TensorBoard logs")
@_run_option(
    "--tracker",
    metavar="NAME",
    help=f"send parameters, metrics and the run folder to {', '.join(configs.EXTRAS_OF_TRACKERS)}",
)
@_run_option("--profile", metavar="FIRST:LAST", help="trace training steps FIRST to LAST - 1")
@_run_option(
    "--verify-steps", type=int, metavar="N", help="compare the first N steps with those of one device, and do not train"
)
@_run_option("--quiet", is_flag=True, help="show errors only")
@_run_option("--verbose", is_flag=True, help="show TensorFlow's messages too")
def command(
    devices: str | None,
    profile: str | None,
    data_option: tuple[str, ...],
    model_option: tuple[str, ...],
    strategy_option: tuple[str, ...],
    workers: int | None,
    ps: int | None,
    restarts: int,
    expose: bool,
    on: str,
    elastic: bool,
    min_workers: int | None,
    max_workers: int | None,
    hostfile: Path | None,
    host_discovery_script: Path | None,
    **options: Any,
) -> int:
    """Train a model on a dataset with a strategy."""
    flags = {name: value for name in configs.STRATEGY_FLAGS if (value := options.pop(name)) is not None}
    settings = registry.parse_options(strategy_option, "--strategy-option")
    config = configs.TrainConfig(
        **options,
        devices=None if devices is None else configs.parse_devices(devices),
        profile=None if profile is None else configs.parse_range(profile),
        data_options=registry.parse_options(data_option, "--data-option"),
        model_options=registry.parse_options(model_option, "--model-option"),
        strategy_options=configs.with_flags(options["strategy"], settings, flags),
    )
    world = World.detect()
    if world.is_evaluator:
        return evaluate_checkpoints(config, world)
    elastic_job = ElasticOptions(elastic, min_workers, max_workers, host_discovery_script)
    wanted = Processes(workers, ps, restarts, expose, on, elastic_job, hostfile)
    check_processes(config, world, wanted)
    if config.verify_steps is not None and job_environment.JOB not in os.environ:
        warn_of_load()
    if world.world_size == 1 and wanted.several and job_environment.JOB not in os.environ:
        return launch(config, wanted, _arguments())
    return run(config, world)


def warn_of_load() -> None:
    """Says that this machine is busy, if its load is well above its cores."""
    excess = job_environment.excess_load(os.getloadavg()[0], os.cpu_count() or 1)
    if excess is not None:
        terminal.say(f"warning: {excess}.")


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that the command should start, according to its options.

    Attributes:
        workers: number of workers; `None` if not set.
        ps: number of parameter servers; `None` if not set.
        restarts: number of times that the job is restarted after a failure.
        expose: do not isolate the job's network.
        on: the cluster to start the processes on; empty for this machine.
        elastic_job: the options of an elastic job.
        hostfile: the hosts of an elastic job.
    """

    workers: int | None
    ps: int | None
    restarts: int
    expose: bool
    on: str
    elastic_job: ElasticOptions
    hostfile: Path | None

    @property
    def several(self) -> bool:
        """Whether the command starts processes."""
        return bool(self.elastic_job.elastic or self.workers is not None or self.ps is not None or self.on)


def check_processes(config: TrainConfig, world: World, wanted: Processes) -> None:
    """Raises `UsageError` if the requested processes do not fit the strategy or the job that `world` describes."""
    for option, role, trait, count in (
        ("--workers", "worker", "processes", wanted.workers),
        ("--ps", "ps", "servers", wanted.ps),
    ):
        if count is not None and not getattr(config.traits, trait):
            raise UsageError(
                f"`{option}` is {count}, but `{config.strategy}` does not take it",
                f"set `TRAITS = Traits({trait}=True)` in its module, as docs/strategies.md shows"
                if ":" in config.strategy
                else "use `--devices`, or one of the strategies " + ", ".join(strategies.having(trait)),
            )
        described = len(world.tasks_of(role)) if world.tasks else world.world_size
        if count is not None and world.world_size > 1 and count != described:
            raise UsageError(
                f"`{option}` is {count}, but {world.source} has {described}",
                f"leave `{option}` out, because {world.source} already describes the job",
            )
    if world.world_size > 1 and not config.traits.processes:
        raise UsageError(
            f"{world.source} describes {world.world_size} processes, but `{config.strategy}` trains in one",
            "unset it, or use one of the strategies " + ", ".join(strategies.having("processes")),
        )
    if wanted.on and (not config.traits.processes or config.traits.mpi):
        able = [name for name in strategies.having("processes") if not strategies.traits(name).mpi]
        raise UsageError(
            f"`--on {wanted.on}` is set, but `{config.strategy}` "
            + ("is started by `mpirun`" if config.traits.mpi else "trains in one process"),
            "use one of the strategies " + ", ".join(able),
        )
    _check_elastic(config, wanted)


def _check_elastic(config: TrainConfig, wanted: Processes) -> None:
    if wanted.elastic_job.elastic and not config.traits.elastic:
        raise UsageError(
            f"`--elastic` is set, but the number of workers of `{config.strategy}` is fixed",
            "use one of the strategies " + ", ".join(strategies.having("elastic")),
        )
    if wanted.elastic_job.elastic and (wanted.workers is not None or wanted.ps is not None):
        option = "--ps" if wanted.workers is None else "--workers"
        raise UsageError(
            f"`{option}` and `--elastic` are both set", "use `--min-workers` and `--max-workers` with `--elastic`"
        )
    if wanted.elastic_job.elastic and wanted.on:
        raise UsageError(f"`--on {wanted.on}` and `--elastic` are both set", "leave one of them out")
    if wanted.hostfile and not wanted.elastic_job.elastic:
        raise UsageError("`--hostfile` is set, but the job is not elastic", "start it with `python -m tfdist.launch`")


def launch(config: TrainConfig, wanted: Processes, arguments: Sequence[str]) -> int:
    """Starts the command with the same `arguments` in several processes, and returns the exit code."""
    from tfdist.launcher import elastic
    from tfdist.launcher import run as launcher
    from tfdist.run.folder import require_regular_outputs

    _require_package(config)
    members = wanted.elastic_job.members(wanted.hostfile) if wanted.elastic_job.elastic else None
    name = job.new_name()
    run_dir = config.run_dir or new_run_dir(config, name)
    require_regular_outputs(run_dir / "output")
    started = job.Job(
        command=("-m", "tfdist.train", *arguments, *(() if config.run_dir else ("--run-dir", str(run_dir)))),
        workers=2 if wanted.workers is None else wanted.workers,
        ps=int(config.traits.servers) if wanted.ps is None else wanted.ps,
        mpi=config.traits.mpi,
        restarts=wanted.restarts,
        expose=wanted.expose,
        on=wanted.on,
        log_dir=run_dir / "output",
        verbose=config.verbose,
        name=name,
    )
    # The dataset is downloaded first, because the job's isolated network may have no access to the internet.
    options = [f"{name}={value!r}" for name, value in config.load_options.items()]
    fetch = [sys.executable, "-m", "tfdist.data.tools.fetch", config.dataset, str(config.data_dir or ""), *options]
    exit_code = subprocess.run(fetch, check=False).returncode
    if exit_code:
        return exit_code
    return launcher.run(started) if members is None else elastic.run(started, members)


def _require_package(config: TrainConfig) -> None:
    """Raises `UsageError` once if the strategy's package is missing, instead of one error per process."""
    package = config.traits.package
    if package is not None and importlib.util.find_spec(package) is None:
        hint = f"run `{extras.command_of_engine(package)}`"
        raise MissingPackageError(f"The strategy `{config.strategy}`", package, hint)


def new_run_dir(config: TrainConfig, job_name: str) -> Path:
    """The default folder of a run."""
    names = [re.sub(r"[:/\\]", ".", name) for name in (config.model, config.dataset, config.strategy)]
    return Path("runs") / "-".join([*names, job_name])


def run(config: TrainConfig, world: World) -> int:
    """Trains according to `config`, and returns the exit code.

    Raises:
        TfdistError: an error before the session begins; a later error is shown, recorded and returned as exit code.
    """
    from tfdist.run.folder import RunFolder

    run_dir = config.run_dir or new_run_dir(config, os.environ.get(job_environment.JOB) or job.new_name(world))
    if os.environ.get(job_environment.RESTART, "0") != "0" and run_dir.exists():
        config = dataclasses.replace(config, run_dir=run_dir, resume=True)
    if not world.is_chief:
        config = dataclasses.replace(config, quiet=not config.verbose)
    # With parameter servers, a single process may be restarted; it then appends to its log.
    may_restart = config.traits.servers and not world.is_chief
    folder = RunFolder(run_dir, resume=config.resume or may_restart, rank=world.rank)
    with terminal.guarded_stdout(), terminal.logged_to(None if config.verbose else folder.log) as stderr:
        show = (lambda *lines: None) if config.quiet else click.echo
        exit_code = _run_and_report(config, folder, show, stderr)
    if exit_code == EXIT_USAGE:
        folder.remove_if_unused()
    return exit_code


def evaluate_checkpoints(config: TrainConfig, world: World) -> int:
    """Evaluates the checkpoints of the training that the other processes of the job run; returns the exit code.

    The evaluator computes alone: its strategy is `single`, with any strategy of the training.
    """
    from tfdist.run.folder import RunFolder

    if config.verify_steps is not None:
        raise UsageError(
            f"{world.source} makes this process {world.place}, and a verification makes no checkpoints to evaluate",
            "start a verification without an evaluator",
        )
    run_dir = config.run_dir
    if run_dir is None:
        raise UsageError(
            f"{world.source} makes this process {world.place}, and `--run-dir` is not set",
            "name the folder of the run, on a file system that the evaluator shares with the chief",
        )
    restarted = os.environ.get(job_environment.RESTART, "0") != "0"
    config = dataclasses.replace(
        config, strategy="single", strategy_options={}, devices=None, resume=config.resume or restarted
    )
    # Made before TensorFlow is imported, so that no early checkpoint is missed.
    folder = RunFolder(run_dir, resume=config.resume, evaluator=world.evaluator)
    show = (lambda *lines: None) if config.quiet else click.echo
    with terminal.guarded_stdout(), terminal.logged_to(None if config.verbose else folder.log) as stderr:
        try:
            return _run_and_report(config, folder, show, stderr)
        finally:
            folder.end_following()


def _run_and_report(config: TrainConfig, folder: RunFolder, show: Callable[..., None], stderr: TextIO) -> int:
    """Runs the session, reports its end on the terminal and in the record, and returns the exit code."""
    session: Session | None = None

    def close(status: str, reason: str) -> None:
        _close(session, status, reason)

    # Shown once, by whichever thread ends the process.
    advise = functools.cache(functools.partial(_advise, config, folder, stderr))
    with process_exit.closed_by(close, advise):
        try:
            startup.require_tensorflow_backend()
            from tfdist.run.session import Session

            typed = os.environ.get(job_environment.TYPED) or shlex.join(sys.orig_argv)
            started = datetime.fromtimestamp(psutil.Process().create_time(), UTC)
            session = Session(config, folder, ["tfdist", "train", *_complete_arguments()], typed, started, show)
            with terminal.interrupts_noticed_by(session.interrupt):
                record = _run(session)
        except TfdistError as error:
            close("failed", error.sentence)
            if isinstance(error, VerificationError):
                show(f"{error.report.table}\n")
            click.echo(f"error: {error}", file=stderr)
            return error.exit_code
        except KeyboardInterrupt:
            advise(process_exit.CTRL_C)  # first, because drawing the curves may take longer than the time that is left
            close("interrupted", process_exit.CTRL_C)
            return EXIT_INTERRUPTED
        except Exception as error:
            close("failed", f"{type(error).__name__}: {error}")
            traceback.print_exc(file=stderr)
            click.echo(f"error: unexpected {type(error).__name__}; the log is {folder.log}", file=stderr)
            return EXIT_UNEXPECTED
    if record is not None and not config.quiet:
        _show_results(record, folder, session.usage)
    return 0


def _show_results(record: RunRecord, folder: RunFolder, usage: Sequence[tuple[str, str]]) -> None:
    """Shows the table at the end of a run."""
    rows = [*_result_rows(record, folder), *usage]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


def _result_rows(record: RunRecord, folder: RunFolder) -> list[tuple[str, str]]:
    """Names and values of a run's results, its speed and its folder, for the table at the end of the run."""
    test = record.test_metrics or {}
    rows = [(f"test {name}", f"{value:.4f}") for name, value in sorted(test.items()) if value is not None]
    # The first epoch includes tracing the graph, so it counts only if there is no other epoch.
    epochs = record.epochs[1:] or record.epochs
    seconds = sum(epoch.train_seconds or 0 for epoch in epochs)
    for name, field in (("examples/s", "examples_per_second"), ("tokens/s", "tokens_per_second")):
        count = sum((getattr(epoch, field) or 0) * (epoch.train_seconds or 0) for epoch in epochs)
        if seconds and count:
            rows.append((name, f"{count / seconds:,.0f}"))
    total = sum(epoch.train_seconds or 0 for epoch in record.epochs)
    rows.append(("training time", f"{total:.1f} s in {terminal.counted(len(record.epochs), 'epoch')}"))
    if record.time_to_target is not None:
        reached = record.time_to_target.seconds
        goal = f"{record.time_to_target.monitor} {record.time_to_target.target:g}"
        rows.append((f"time to {goal}", "not reached" if reached is None else f"{reached:.1f} s"))
    if record.peak_memory_bytes:
        rows.append(("peak memory", f"{record.peak_memory_bytes / 2**20:,.0f} MiB"))
    if record.utilization is not None and record.utilization.flops_per_second is not None:
        rows.append(("computation", _computation(record.utilization)))
    return [*rows, ("files", str(folder.path))]


def _computation(utilization: UtilizationRecord) -> str:
    """The FLOPs of a step and of a second, and their share of the machine's peak."""
    text = (
        f"{terminal.flops(utilization.flops_per_step)} per step, {terminal.flops(utilization.flops_per_second or 0)}/s"
    )
    return text if utilization.mfu is None else f"{text}: {utilization.mfu:.1%} of the measured peak (MFU)"


def _run(session: Session) -> RunRecord | None:
    """Trains, verifies or evaluates checkpoints; returns the record of a training, else `None`."""
    try:
        if session.folder.follower is not None:
            session.evaluate_checkpoints()
            return None
        if session.config.verify_steps is None:
            return session.run()
        session.verify()
        return None
    except Exception as error:
        if isinstance(error, ClusterError):
            process_exit.end_if_signalled()
        # If all processes are interrupted and one ends first, the errors of the others are consequences, not failures.
        session.raise_if_interrupted()
        raise


def _close(session: Session | None, status: Any, reason: str) -> None:
    """Records the end of the run, unless it is already recorded."""
    if session is not None and (session.record is None or session.record.status == "running"):
        session.close(status, reason)


def _advise(config: TrainConfig, folder: RunFolder, stderr: TextIO, reason: str) -> None:
    """Says in one line for the job by what the run was ended, and how to go on; `stderr` may be closed."""
    if not folder.is_chief or config.verify_steps is not None:
        return
    from tfdist.checkpointing import format as checkpoints

    ended = "Interrupted" if reason == process_exit.CTRL_C else f"Ended by {reason}"
    has_checkpoint = bool(checkpoints.paths(folder.checkpoints))
    advice = f"{ended}; continue" if has_checkpoint else f"{ended} before the first checkpoint; start over"
    line = f"{advice} with `python -m tfdist.train --resume --run-dir {shlex.quote(str(folder.path))}`"
    with contextlib.suppress(OSError):
        click.echo(line, file=stderr)


def _arguments() -> list[str]:
    """The arguments of `tfdist train` that are equivalent to the command line."""
    has_subcommand = sys.argv[1:2] in (["train"], ["verify"])
    verifies = sys.argv[1:2] == ["verify"] or Path(sys.argv[0]).name == "verify.py"
    return [*(("--verify-steps", str(VERIFY_STEPS)) if verifies else ()), *sys.argv[1 + has_subcommand :]]


def _complete_arguments() -> list[str]:
    """The arguments of the run: those of the command line, with those of the run that it resumes."""
    context = click.get_current_context(silent=True)
    return list((context.meta if context else {}).get(COMMAND) or _arguments())


def main() -> None:
    """Runs the command; a usage error ends with exit code 2."""
    command(prog_name="python -m tfdist.train")


if __name__ == "__main__":
    main()
