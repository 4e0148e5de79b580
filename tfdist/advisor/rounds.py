"""The inputs of the cost model, measured in rounds: what varies between rounds shows how far predictions can be off."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from tfdist import terminal
from tfdist.advisor import measured
from tfdist.advisor.costs import Facts, Jobs, Link
from tfdist.errors import UsageError

BYTES_OF_FLOAT32 = 4
ROUNDS = 3
# The strategies that are predicted, and the one whose link between two processes of this machine is theirs too.
LINKS = {"multiworker": "multiworker", "horovod": "horovod", "mpi_split": "mpi_split", "pipeline": "multiworker"}
# Strategies that are predicted from the latency and bandwidth of a described link.
WITH_LINK = (*LINKS, "parameter_server")


def trainable(work: measured.Work, described: Link | None, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the strategies with which two processes train the model, and why the others do not, by strategy."""
    refusals = {}
    names = WITH_LINK if described else tuple(LINKS)
    for name in names:
        terminal.say(f"Trying whether `{name}` trains the model ...")
        sentence = measured.refusal(work, name, folder / f"trial-{name}")
        if sentence is not None:
            refusals[name] = sentence
    return [name for name in names if name not in refusals], refusals


def measure(
    work: measured.Work, counts: Sequence[int], names: Sequence[str], described: Link | None, folder: Path
) -> tuple[list[Facts], dict[int, str]]:
    """Measures what the predictions need.

    Args:
        work: the training.
        counts: numbers of workers.
        names: the strategies for several workers.
        described: the link between machines; `None` for workers that share this machine, whose links are measured.
        folder: the folder for the runs.

    Returns:
        The inputs of each round, and why the model cannot be divided into a number of stages, by that number.
    """
    facts: list[Facts] = []
    refusals: dict[int, str] = {}
    for number in range(ROUNDS):
        terminal.say(f"Round {number + 1} of {ROUNDS}:")
        measured_facts, refused = measure_once(work, counts, names, described, folder / f"round-{number}")
        facts.append(measured_facts)
        refusals |= refused
    # Cuts follow from measured times, so that a number of stages may be refused in one round only.
    return [_without_stages(measured_facts, refusals) for measured_facts in facts], refusals


def measure_once(
    work: measured.Work, counts: Sequence[int], names: Sequence[str], described: Link | None, folder: Path
) -> tuple[Facts, dict[int, str]]:
    """Measures the inputs of one round; also returns why the model cannot be divided into numbers of stages."""
    compute, micro_batched_seconds = {}, {}
    for count in [1] if described else sorted({1, *counts}):
        processes = "one process" if count == 1 else f"{count} simultaneous processes"
        terminal.say(f"Measuring steps of {processes} ...")
        if described:
            compute[count], record = measured.compute_of_any_part(work, folder)
        else:
            compute[count], record = measured.compute(work, count, folder)
        if "pipeline" in names and (count > 1 or described):
            micro_batched_seconds[count] = measured.micro_batched_seconds(work, count, folder)
    terminal.say("Measuring the bytes of weights and slots, and the stages of a pipeline ...")
    stages = [count for count in counts if count > 1] if "pipeline" in names else []
    sharing = stages[0] if stages and described is None else 1
    pipelines = measured.pipelines(work, stages, sharing, folder / "stages")
    facts = Facts(
        batch_size=work.batch_size,
        steps=max(1, work.examples // work.batch_size),
        bytes=(record.model.parameters or 0) * BYTES_OF_FLOAT32,
        compute=compute,
        links=_links(names) if described is None else dict.fromkeys(names, described),
        machines=described is not None,
        averaged_bytes=pipelines.averaged_bytes,
        micro_batched_seconds=micro_batched_seconds,
        stages=pipelines.stages,
    )
    return _with_jobs(facts, work, counts, names, folder), dict(pipelines.refusals)


def _with_jobs(facts: Facts, work: measured.Work, counts: Sequence[int], names: Sequence[str], folder: Path) -> Facts:
    """Adds measured jobs for workers that share this machine, and in any case what an averaging takes."""
    processes = 2 if facts.machines else min((count for count in counts if count > 1), default=0)
    step_seconds, averaging_seconds = {}, 0.0
    for name in names if processes else ():
        if facts.machines and name != "mpi_split":
            continue  # two processes of this machine have other costs than machines with a link between them
        terminal.say(f"Measuring a job of {processes} processes of `{name}` ...")
        try:
            step_seconds[name], of_averaging = measured.job(work, name, processes, folder / f"job-{name}")
        except UsageError as error:  # it trains on CPUs, and may not with one GPU for several processes
            terminal.say(f"{error.sentence}; `{name}` is predicted without it")
            continue
        averaging_seconds = of_averaging or averaging_seconds
    jobs = None
    if step_seconds and not facts.machines:
        jobs = Jobs(processes, work.epoch_steps, step_seconds)
    return dataclasses.replace(facts, jobs=jobs, copy_seconds=_copy_seconds(facts, averaging_seconds, processes))


def _links(names: Sequence[str]) -> dict[str, Link]:
    """Measures the links between two processes of this machine for the strategies `names`, where that is possible."""
    engines = dict.fromkeys(LINKS[name] for name in names)
    links = {}
    for engine in engines:
        terminal.say(f"Measuring the link between two processes of `{engine}` ...")
        links[engine] = measured.link(engine)
    return {name: link for name in names if (link := links[LINKS[name]]) is not None}


def _copy_seconds(facts: Facts, averaging_seconds: float, processes: int) -> float:
    """The part of an averaging of processes of this machine that is not the exchange over their link."""
    if facts.machines or "mpi_split" not in facts.links:
        return averaging_seconds
    return max(0.0, averaging_seconds - facts.links["mpi_split"].all_reduce_seconds(facts.averaged_bytes, processes))


def _without_stages(facts: Facts, counts: Collection[int]) -> Facts:
    return dataclasses.replace(facts, stages={key: value for key, value in facts.stages.items() if key not in counts})
