"""Shows results of the matrix: a line each, and a table in Markdown."""

import collections

OUTPUT_CHARACTERS = 4000
NOTHING = "-"


def cells(result):
    """Engine, process, fault, moment, seconds, exit codes, who was named, what was left, and whether it passes."""
    row = result.row
    exits = ", ".join(f"{name}: {'there' if code is None else code}" for name, code in result.exits.items())
    return [
        f"`{row.engine}`" + (f" ({' '.join(('launcher', *row.arguments))})" if row.launched else ""),
        row.role,
        row.fault,
        row.moment,
        NOTHING if result.seconds is None else f"{result.seconds:.1f}",
        exits or NOTHING,
        ", ".join(result.named) or NOTHING,
        ", ".join(result.left) or "nothing",
        f"skipped: {result.skipped}" if result.skipped else "; ".join(result.problems) or "yes",
    ]


HEADER = ["engine", "process", "fault", "moment", "seconds", "exit codes", "named", "left", "as promised"]


def line(result):
    status = "SKIPPED" if result.skipped else "FAILED" if result.problems else "ok"
    return f"{status:7} {' | '.join(cells(result))}"


def output(result):
    return "\n".join(f"--- {name}\n{text[-OUTPUT_CHARACTERS:]}" for name, text in result.output.items())


def markdown(results):
    lines = [HEADER, ["---"] * len(HEADER), *map(cells, results)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{summary(results)}\n"


def summary(results):
    count = collections.Counter("skipped" if r.skipped else "failed" if r.problems else "as promised" for r in results)
    return f"{len(results)} rows: " + ", ".join(f"{number} {name}" for name, number in count.items())
