"""`python -m tfdist.train`: trains a model on a dataset with a strategy, and leaves a run folder.

This module alone knows all parts of a run. Nothing slow is imported until the options have been checked:

    parse → TrainConfig → RunFolder → (TensorFlow) strategy → data → model → fit → evaluate → record → table
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
import psutil

from tfdist import data, models, registry, startup, strategies, terminal
from tfdist.data.input import augmentation
from tfdist.errors import EXIT_INTERRUPTED, EXIT_USAGE, TfdistError, VerificationError
from tfdist.jobs import job_environment, process_exit
from tfdist.jobs.world import World
from tfdist.launcher import job
from tfdist.launcher.elastic_options import ElasticOptions, elastic_options
from tfdist.run import config as configs
from tfdist.run import processes, recipes, summary

if TYPE_CHECKING:
    from tfdist.run.config import TrainConfig
    from tfdist.run.folder import RunFolder
    from tfdist.run.schema import RunRecord
    from tfdist.run.session import Session

EXIT_UNEXPECTED = 1
VERIFY_STEPS = 3  # of `tfdist verify`


def _names(found: list[str] | tuple[str, ...], own: str = "") -> str:
    return ", ".join(found) + (f", or your own as module:{own}" if own else "")


def _take_recipe(context: click.Context, option: click.Parameter, name: str | None) -> None:
    """Makes the options of a recipe the defaults of the others."""
    del option
    if name is None:
        return
    context.default_map = {**(context.default_map or {}), **recipes.load(name)}


_data = terminal.options_of("Data")
_model = terminal.options_of("Model")
_optimisation = terminal.options_of("Optimisation")
_strategy = terminal.options_of("Strategy")
_processes = terminal.options_of("Processes")
_of_run = terminal.options_of("Run")


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
    """A command that, with `--resume`, takes the options that are not given from the run that it continues."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.default_map = self._options_of_earlier_run(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> None:
        try:
            super().invoke(ctx)
        except SystemExit as ended:
            if ended.code:  # other processes of the job may wait for this one
                process_exit.fail(int(ended.code))
            raise

    def _options_of_earlier_run(self, ctx: click.Context, args: Sequence[str]) -> dict[str, Any]:
        if "--resume" not in args:
            return {}
        given = self._parsed(ctx, args)
        if not given.get("resume") or given.get("help"):
            return {}
        configs.require_run_to_resume(True, given.get("run_dir"))
        from tfdist.run.folder import load_record

        if given.get("strategy") and not (Path(given["run_dir"]) / "run.json").exists():
            return {}  # the run ended before it wrote a record
        earlier = self._parsed(ctx, load_record(given["run_dir"]).command[2:])
        recipe = earlier.pop("recipe", None)
        for name in ("resume", "run_dir"):
            earlier.pop(name, None)
        return (recipes.load(recipe) if recipe else {}) | {name: _last_of_each(v) for name, v in earlier.items()}

    def _parsed(self, ctx: click.Context, args: Sequence[str]) -> dict[str, Any]:
        """The text that is given for each parameter."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        return parser.parse_args(list(args))[0]


def _last_of_each(value: Any) -> Any:
    """The last setting of each name, of a list of settings NAME=VALUE; any other value itself."""
    if not isinstance(value, list):
        return value
    return list({setting.partition("=")[0]: setting for setting in value}.values())


@click.command(
    cls=_TrainCommand,
    epilog=EXAMPLES,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": terminal.HELP_WIDTH,
        # `--batch_size` is `--batch-size`; names of models and modules stay as they are.
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
)
@_data("--dataset", required=True, metavar="NAME", help=_names(data.names(), own="function"))
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
    help="of training steps: real, cached (read once, into memory), synthetic (one batch, repeated)",
)
@_model("--model", required=True, metavar="NAME", help=_names(models.names(), own="function"))
@_model("--model-option", multiple=True, metavar="NAME=VALUE", help="an option of the model; may be repeated")
@_model("--dtype-policy", default="float32", show_default=True, metavar="NAME", help=_names(configs.DTYPE_POLICIES))
@_optimisation("--epochs", type=int, default=5, show_default=True, help="passes over the training examples")
@_optimisation("--batch-size", type=int, default=32, show_default=True, help="examples per global batch")
@_optimisation(
    "--optimizer", metavar="NAME", help=_names(configs.OPTIMIZERS) + "; by default the one usual for the model"
)
@_optimisation("--learning-rate", type=float, help="learning rate; by default the one usual for the model")
@_optimisation("--momentum", type=float, help="momentum of sgd; by default the one usual for the model")
@_optimisation("--weight-decay", type=float, help="weight decay; by default the one usual for the model")
@_optimisation("--schedule", default="constant", show_default=True, metavar="NAME", help=_names(configs.SCHEDULES))
@_optimisation("--warmup-epochs", type=float, default=0.0, help="epochs in which the learning rate rises from 0")
@_optimisation("--gradient-accumulation", type=int, default=1, show_default=True, help="batches per update")
@_optimisation("--seed", type=int, default=0, show_default=True, help="seed of weights, order and random layers")
@_optimisation("--target-accuracy", type=float, metavar="FRACTION", help="stop at this validation accuracy")
@_strategy("--strategy", required=True, metavar="NAME", help=_names(strategies.names(), own="Class"))
@_strategy("--strategy-option", multiple=True, metavar="NAME=VALUE", help="an option of the strategy; may be repeated")
@_strategy("--devices", metavar="N|NAMES", help="number or names of the devices of a process, such as GPU:0,GPU:1")
@_strategy_flags
@_processes("--workers", type=int, metavar="N", help="number of processes to start on this machine")
@_processes("--ps", type=int, metavar="N", help="number of parameter servers to start on this machine")
@elastic_options
@_processes(
    "--hostfile",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="hosts of an elastic job, one line `host slots=2` each; changes take effect",
)
@_processes(
    "--restarts", type=int, default=0, show_default=True, metavar="N", help="restarts of the job after a failure"
)
@_processes("--expose", is_flag=True, help="do not isolate the job's network")
@_of_run(
    "--recipe",
    metavar="NAME",
    is_eager=True,
    expose_value=False,
    callback=_take_recipe,
    help="use the options of a recipe where no others are given: " + _names(recipes.names()),
)
@_of_run(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="folder of the run; a new one in runs/ by default",
)
@_of_run("--resume", is_flag=True, help="continue the run in --run-dir with its options; those given here replace them")
@_of_run(
    "--checkpoint-steps", type=int, metavar="N", help="save a checkpoint every N steps, and at the end of each epoch"
)
@_of_run("--tensorboard", is_flag=True, help="write TensorBoard logs")
@_of_run("--profile", metavar="FIRST:LAST", help="trace training steps FIRST to LAST - 1")
@_of_run(
    "--verify-steps", type=int, metavar="N", help="compare the first N steps with those of one device, and do not train"
)
@_of_run("--quiet", is_flag=True, help="show errors only")
@_of_run("--verbose", is_flag=True, help="show TensorFlow's messages too")
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
    elastic_job = ElasticOptions(elastic, min_workers, max_workers, host_discovery_script)
    wanted = processes.Processes(workers, ps, restarts, expose, elastic_job, hostfile)
    processes.check(config, world, wanted)
    if world.world_size == 1 and wanted.several and job_environment.JOB not in os.environ:
        return processes.launch(config, wanted, _arguments())
    return run(config, world)


def run(config: TrainConfig, world: World) -> int:
    """Trains as `config` says and returns the exit code.

    Raises:
        TfdistError: an error before the session begins; a later one is shown, recorded and returned as exit code.
    """
    from tfdist.run.folder import RunFolder

    run_dir = config.run_dir or processes.new_run_dir(
        config, os.environ.get(job_environment.JOB) or job.new_name(world)
    )
    if os.environ.get(job_environment.RESTART, "0") != "0" and run_dir.exists():
        config = dataclasses.replace(config, run_dir=run_dir, resume=True)
    if not world.is_chief:
        config = dataclasses.replace(config, quiet=not config.verbose)
    # With parameter servers, a process that is restarted finds its log there, and continues it.
    serves = config.traits.servers and not world.is_chief
    folder = RunFolder(run_dir, resume=config.resume or serves, rank=world.rank)
    with terminal.any_stdout(), terminal.logged_to(None if config.verbose else folder.log) as stderr:
        show = (lambda *lines: None) if config.quiet else click.echo
        exit_code = _reported(config, folder, show, stderr)
    if exit_code == EXIT_USAGE:
        folder.remove_if_unused()
    return exit_code


def _reported(config: TrainConfig, folder: RunFolder, show: Callable[..., None], stderr: TextIO) -> int:
    """Runs the session, and reports its end on the terminal and in the record."""
    session: Session | None = None
    try:
        startup.require_tensorflow_backend()
        from tfdist.run.session import Session

        session = Session(config, folder, _command(), _typed(), _process_start(), show)
        close = functools.partial(_close, session, stderr)
        with terminal.noticed_interrupts(session.interrupt), process_exit.closed_by(close):
            record = _run(session)
    except TfdistError as error:
        _close(session, stderr, "failed", error.sentence)
        if isinstance(error, VerificationError):
            show(f"{error.report.table}\n")
        click.echo(f"error: {error}", file=stderr)
        return error.exit_code
    except KeyboardInterrupt:
        _close(session, stderr, "interrupted", "Ctrl-C")
        return EXIT_INTERRUPTED
    except Exception as error:
        _close(session, stderr, "failed", f"{type(error).__name__}: {error}")
        traceback.print_exc(file=stderr)
        click.echo(f"error: unexpected {type(error).__name__}; the log is {folder.log}", file=stderr)
        return EXIT_UNEXPECTED
    if record is not None and not config.quiet:
        summary.print_table([*summary.rows(record, folder), *session.usage])
    return 0


def _run(session: Session) -> RunRecord | None:
    """The record of the training; `None` after a verification."""
    try:
        if session.config.verify_steps is None:
            return session.run()
        session.verify()
        return None
    except Exception:
        # If processes are interrupted together and one ends first, the errors of the others are no failures.
        session.raise_if_interrupted()
        raise


def _close(session: Session | None, stderr: TextIO, status: Any, reason: str) -> None:
    """Records the end of the run, unless it is recorded already; `stderr` may be closed."""
    if session is None or (session.record is not None and session.record.status != "running"):
        return
    # Shown first: drawing the curves may take longer than the time that a terminated process has left.
    if session.record is not None and status == "interrupted":
        with contextlib.suppress(OSError):
            again = f"python -m tfdist.train --resume --run-dir {session.folder.path}"
            click.echo(f"Interrupted; continue with `{again}`", file=stderr)
    session.close(status, reason)


def _arguments() -> list[str]:
    """The options as those of `train`."""
    by_name = sys.argv[1:2] in (["train"], ["verify"])
    verifies = sys.argv[1:2] == ["verify"] or Path(sys.argv[0]).name == "verify.py"
    return [*(("--verify-steps", str(VERIFY_STEPS)) if verifies else ()), *sys.argv[1 + by_name :]]


def _command() -> list[str]:
    return ["tfdist", "train", *_arguments()]


def _typed() -> str:
    return os.environ.get(job_environment.TYPED) or shlex.join(sys.orig_argv)


def _process_start() -> datetime:
    return datetime.fromtimestamp(psutil.Process().create_time(), UTC)


def main() -> None:
    """The command; a misused option ends with exit code 2."""
    command(prog_name="python -m tfdist.train")


if __name__ == "__main__":
    main()
