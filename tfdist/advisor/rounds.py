"""The inputs of the cost model, measured in rounds: what varies between rounds shows how far predictions can be off."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from tfdist import terminal
from tfdist.advisor import measured
from tfdist.advisor.costs import Facts, Link

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
    averaging_seconds = 0.0
    if "mpi_split" in names:
        terminal.say("Measuring the time to average the weights ...")
        averaging_seconds = measured.averaging_seconds(work, folder / "averaging") or 0.0
    facts: list[Facts] = []
    refusals: dict[int, str] = {}
    for number in range(ROUNDS):
        terminal.say(f"Round {number + 1} of {ROUNDS}:")
        measured_facts, refused = _round(work, counts, names, described, folder / f"round-{number}")
        facts.append(dataclasses.replace(measured_facts, copy_seconds=_copy_seconds(measured_facts, averaging_seconds)))
        refusals |= refused
    # Cuts follow from measured times, so that a number of stages may be refused in one round only.
    return [_without_stages(measured_facts, refusals) for measured_facts in facts], refusals


def _round(
    work: measured.Work, counts: Sequence[int], names: Sequence[str], described: Link | None, folder: Path
) -> tuple[Facts, dict[int, str]]:
    """Measures the inputs once; also returns why the model cannot be divided into numbers of stages."""
    compute, micro_batched_seconds = {}, {}
    for count in [1] if described else sorted({1, *counts}):
        processes = "one process" if count == 1 else f"{count} simultaneous processes"
        terminal.say(f"Measuring steps of {processes} ...")
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
    return facts, dict(pipelines.refusals)


def _links(names: Sequence[str]) -> dict[str, Link]:
    """Measures the links between two processes of this machine for the strategies `names`, where that is possible."""
    engines = dict.fromkeys(LINKS[name] for name in names)
    links = {}
    for engine in engines:
        terminal.say(f"Measuring the link between two processes of `{engine}` ...")
        links[engine] = measured.link(engine)
    return {name: link for name in names if (link := links[LINKS[name]]) is not None}


def _copy_seconds(facts: Facts, averaging_seconds: float) -> float:
    """The part of an averaging of two processes of this machine that is not the exchange over their link."""
    if facts.machines or "mpi_split" not in facts.links:
        return averaging_seconds
    return max(0.0, averaging_seconds - facts.links["mpi_split"].all_reduce_seconds(facts.averaged_bytes, 2))


def _without_stages(facts: Facts, counts: Collection[int]) -> Facts:
    return dataclasses.replace(facts, stages={key: value for key, value in facts.stages.items() if key not in counts})
