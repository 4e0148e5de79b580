"""`python -m tfdist.data`: measures the input pipeline of a dataset without a model, and draws some examples."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from tfdist import data, extras, files, registry, terminal
from tfdist.data.formats import byte_pairs
from tfdist.data.input import augmentation as augmentations
from tfdist.data.input import bad_examples
from tfdist.data.spec import PADDING, DataSpec
from tfdist.errors import UnknownNameError, UsageError

# The contact sheet.
COLUMNS, ROWS = 6, 4
PICTURES = (".png", ".jpg", ".svg", ".pdf")
_INCHES, _DOTS = 1.6, 100


_data = terminal.options_of("Data")
_pipeline = terminal.options_of("Pipeline")
_output = terminal.options_of("Measurement and picture")


@click.command(cls=terminal.EstimateCommand)
@_data("--dataset", required=True, metavar="NAME", help=", ".join(data.names()) + ", or your own module:function")
@_pipeline("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="examples per batch")
@_data("--data-dir", type=click.Path(path_type=Path), metavar="FOLDER", help="folder of the dataset's files")
@_data("--data-option", multiple=True, metavar="NAME=VALUE", help="an option of the dataset; may be repeated")
@_pipeline("--augment", default="none", show_default=True, metavar="NAME", help=", ".join(augmentations.NAMES))
@_data(
    "--on-bad-example",
    metavar="NAME",
    help="what to do with a bad file or line: " + ", ".join(bad_examples.POLICIES),
)
@_data("--split", default="train", show_default=True, metavar="NAME", help=", ".join(data.SPLITS))
@_pipeline("--seed", type=int, default=0, show_default=True, help="seed of order and augmentation")
@_output("--seconds", type=float, default=3.0, show_default=True, help="how long to run the pipeline")
@_output(
    "--sheet",
    type=click.Path(path_type=Path),
    default="examples.png",
    show_default=True,
    metavar="FILE",
    help="the picture of some examples",
)
def command(dataset: str, data_dir: Path | None, data_option: tuple[str, ...], **options: Any) -> None:
    """Measure a dataset's input pipeline: its speed, its stages, the machine's limit; draw some examples."""
    if options["split"] not in data.SPLITS:
        raise UnknownNameError("split", options["split"], data.SPLITS)
    if options["sheet"].suffix not in PICTURES:
        raise UsageError(f"`--sheet` is `{options['sheet']}`", f"use a file name that ends with {', '.join(PICTURES)}")
    files.require_writable(options["sheet"], "--sheet")
    settings = registry.parse_options(data_option, "--data-option")
    policy = options.pop("on_bad_example")
    source = data.load(dataset, data_dir, **settings, **({} if policy is None else {"on_bad_example": policy}))
    show(source, **options)


def show(
    source: data.Source, *, batch_size: int, augment: str, split: str, seed: int, seconds: float, sheet: Path
) -> None:
    """Measures, prints a table, and draws the contact sheet of the first batch."""
    from tfdist.data.tools import pipeline_speed
    from tfdist.jobs.job_environment import cores

    shown = max(batch_size, ROWS * COLUMNS)
    x, y = next(source.pipeline(split, shown, augment=augment, seed=seed).as_numpy_iterator())
    draw_contact_sheet(sheet, source.spec, x, y)
    speed = pipeline_speed.measure(source, split, batch_size, augment, seed, seconds)
    _print_table(source, speed, cores(), pipeline_speed.memory_bandwidth(), sheet)


def _print_table(source: data.Source, speed: Any, cores: int, bandwidth: float, sheet: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    spec = source.spec
    total = sum(speed.stage_seconds.values())
    bound, limited_by = speed.bound
    rows = [
        ("dataset", f"{spec.name}, {spec.task}"),
        ("examples", ", ".join(f"{split} {count:,}" for split, count in spec.examples.items())),
        ("bad examples left out", f"{len(source.skipped):,}"),
        ("one example", f"{spec.input_shape} -> {spec.target_shape or 'a label'}, {speed.bytes_per_example:,} bytes"),
        ("pipeline", f"{speed.examples_per_second:,.0f} examples/s"),
        *(
            (f"  {stage}", f"{seconds * 1e6:,.1f} us per example, {seconds / total:.0%}")
            for stage, seconds in speed.stage_seconds.items()
        ),
        ("bound", f"{bound:,.0f} examples/s by {limited_by}; reached {speed.examples_per_second / bound:.0%}"),
    ]
    if "decode" in speed.stage_seconds:
        decoding = speed.stage_seconds["read"] + speed.stage_seconds["decode"]
        rows.append(("decode rate", f"{1 / decoding:,.0f} examples/s per core, {cores} cores"))
    rows += [("memory bandwidth", f"{bandwidth / 1e9:,.1f} GB/s, one core copying"), ("examples drawn in", str(sheet))]
    table = Table(show_header=False, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    with terminal.guarded_stdout(needed=True):
        Console(soft_wrap=True).print(table)


def draw_contact_sheet(path: Path, spec: DataSpec, x: Any, y: np.ndarray) -> None:
    """Writes a picture of the first examples of (x, y), which `tfdist.data.spec` describes."""
    with extras.importing("train", "The picture of the examples"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMNS * _INCHES, ROWS * _INCHES), dpi=_DOTS, layout="constrained")
    if len(spec.input_shape) == 3:
        _draw_pictures(figure, spec, x, y)
    else:
        figure.text(0.02, 0.98, "\n".join(_lines(spec, x, y)), va="top", family="monospace", size=7)
    figure.savefig(path)


def _draw_pictures(figure: Any, spec: DataSpec, x: np.ndarray, y: np.ndarray) -> None:
    """Draws each picture below its class, or beside its mask."""
    masks = spec.task == "segmentation"
    panels = 2 if masks else 1
    axes = figure.subplots(ROWS, COLUMNS).reshape(-1)
    for panel in axes:
        panel.set_axis_off()
    for number, example in enumerate(x[: len(axes) // panels]):
        grey = example.shape[-1] == 1
        panel = axes[number * panels]
        panel.imshow(example[..., 0] if grey else example, cmap="gray" if grey else None, vmin=0, vmax=1)
        if masks:
            # 20 colours distinguish neighbouring classes; ignored pixels stay white.
            shown = np.ma.masked_equal(y[number], -1 if spec.ignored_class is None else spec.ignored_class)
            axes[number * panels + 1].imshow(shown % 20, cmap="tab20", vmin=0, vmax=19, interpolation="nearest")
        elif spec.task == "classification":
            panel.set_title(_class(spec, int(y[number])), size=8)


def _lines(spec: DataSpec, x: Any, y: np.ndarray) -> list[str]:
    if spec.task == "translation":
        return [
            line
            for source, target in zip(x["source"][: ROWS * 3], y, strict=False)
            for line in (_words(spec.vocabulary, source), "    " + _words(spec.target_vocabulary, target))
        ]
    if spec.task == "characters":
        pairs = zip(x[: ROWS * 6], y, strict=False)
        return [f"{_characters(spec, text)}  ->  {_characters(spec, target)}" for text, target in pairs]
    if spec.task == "masked_lm":
        return [
            line
            for text, words in zip(x[: ROWS * 3], y, strict=False)
            for line in (_words(spec.vocabulary, text), "    " + _words(spec.vocabulary, words[words >= 0]))
        ]
    if spec.task == "recommendation":
        pairs = zip(x[: ROWS * 6], y, strict=False)
        return [f"{_words(spec.vocabulary, items)}  ->  {_words(spec.vocabulary, [item])}" for items, item in pairs]
    if spec.task == "click_prediction":
        rows = zip(x["numbers"][: ROWS * 6], x["categories"], y, strict=False)
        return [f"{label}  {_numbers(numbers)}  {_numbers(categories)}" for numbers, categories, label in rows]
    words = spec.task == "text_classification"
    return [
        f"{_class(spec, int(label)):>10}  "
        + (_words(spec.vocabulary, example) if words else np.array2string(example, precision=3))
        for example, label in zip(x[: ROWS * 6], y, strict=False)
    ]


def _class(spec: DataSpec, label: int) -> str:
    return spec.class_names[label] if spec.class_names else str(label)


def _numbers(values: np.ndarray) -> str:
    return np.array2string(values, precision=3, max_line_width=200)


def _words(vocabulary: tuple[str, ...], tokens: Iterable[int]) -> str:
    words = [vocabulary[token] if vocabulary else str(token) for token in tokens if token != PADDING]
    # A dollar would begin a formula in Matplotlib.
    text = " ".join(words).replace("$", r"\$")
    return text if len(text) <= 150 else text[:149] + "…"


def _characters(spec: DataSpec, tokens: np.ndarray) -> str:
    names = [spec.vocabulary[token] if spec.vocabulary else chr(97 + token % 26) for token in tokens[:60]]
    text = byte_pairs.BytePairs(spec.vocabulary).decode(tokens[:60]) if spec.byte_tokens else "".join(names)
    return repr(text).replace("$", r"\$")


if __name__ == "__main__":
    command(prog_name="python -m tfdist.data")
