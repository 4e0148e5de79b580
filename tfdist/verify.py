"""`tfdist verify`: compares the first steps of a strategy with those of one device, without training.

It is `tfdist train --verify-steps 3` with the options that matter for it. The exit code is 1 if the steps differ.
"""

from __future__ import annotations

from typing import Any

import click

from tfdist import terminal, train

_TRAIN_OPTIONS = (
    *("dataset", "data_option", "data_dir", "limit", "augment", "on_bad_example"),
    *("model", "model_option", "dtype_policy"),
    *("batch_size", "optimizer", "learning_rate", "momentum", "weight_decay", "gradient_accumulation", "seed"),
    *("strategy", "strategy_option", "devices", "communication", "compression", "shard_bytes"),
    *("sync_every", "staleness"),
    *("timeout_seconds", "callback_timeout_seconds", "workers", "ps", "expose"),
    *("run_dir", "quiet", "verbose", "verify_steps"),
)


def _run(**options: Any) -> Any:
    """Compare the first steps of a strategy with those of one device; exit code 1 if they differ."""
    if options.get("verify_steps") is None:
        options["verify_steps"] = train.VERIFY_STEPS
    return click.get_current_context().invoke(train.command, **options)


command = terminal.Command(
    "verify",
    callback=_run,
    help=_run.__doc__,
    params=[option for option in train.command.params if option.name in _TRAIN_OPTIONS],
)


if __name__ == "__main__":
    command(prog_name="python -m tfdist.verify")
