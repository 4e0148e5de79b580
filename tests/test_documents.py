"""The README's script and the examples run as they are printed; the modules' own synopses are true."""

import ast
import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tfdist.errors

ROOT = Path(__file__).parent.parent
WITH_SYNOPSIS = [
    "tfdist.groups.sockets.costs",
    "tfdist.groups.sockets.messages",
    "tfdist.groups.sockets.operations",
    "tfdist.groups.sockets.tree",
    "tfdist.jobs.job_environment",
    "tfdist.jobs.tree",
    "tfdist.run.config",
    "tfdist.data.input.order",
    "tfdist.doctor.engines",
    "tfdist.errors",
    "tfdist.launcher.emit",
    "tfdist.models",
    "tfdist.options",
    "tfdist.registry",
    "tfdist.run.folder",
    "tfdist.run.schema",
    "tfdist.strategies",
    "tfdist.jobs.slurm",
    "tfdist.jobs.world",
    "tfdist.relaxed.compression",
    "tfdist.relaxed.outer_rules",
]


def run(script, cwd):
    return subprocess.run(
        [sys.executable, str(script)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_script_in_the_readme_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(block)
    done = run(tmp_path / "script.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Epoch 3/3" in done.stdout


def scripts(page):
    """The whole scripts of a page: its blocks of Python, and what its diffs lead to."""
    blocks = re.findall(r"```(python|diff)\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    for language, block in blocks:
        lines = block.splitlines()
        after = [line[1:] for line in lines if not line.startswith("-")] if language == "diff" else lines
        yield "\n".join(after) + "\n"


ONE_AFTER_THE_OTHER = """
import runpy, sys
import keras

for path in sys.argv[1:]:
    print("script", path, flush=True)
    runpy.run_path(path, run_name="__main__")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
"""


@pytest.mark.thorough
def test_the_scripts_of_the_first_pages_run(tmp_path):
    (tmp_path / "all.py").write_text(ONE_AFTER_THE_OTHER)
    written = [text for page in ("getting_started.md", "port.md", "how_to.md") for text in scripts(page)]
    if importlib.util.find_spec("horovod") is None:
        written = [text for text in written if '"horovod"' not in text]
    paths = [f"script_{number}.py" for number in range(len(written))]
    for path, text in zip(paths, written, strict=True):
        (tmp_path / path).write_text(text)
    done = subprocess.run(
        [sys.executable, "all.py", *paths], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(written) >= 9 and done.stdout.count("script ") == len(written)
    assert (tmp_path / "checkpoints").exists() and "UserWarning" not in done.stderr


USES = """
import keras
import numpy as np
import tfdist

strategy = tfdist.strategy("mine:LastDevice", seed=1)
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
strategy.prepare(model)
model.fit(np.ones((10, 2)), np.ones((10, 1)), epochs=2, verbose=0)
print(strategy.name, model.weights[0].value.device)
"""


@pytest.mark.thorough
def test_the_strategy_in_the_documents_runs_from_the_users_folder(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "strategies.md").read_text(), re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    (tmp_path / "script.py").write_text(USES)
    done = run(tmp_path / "script.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "last_device" in done.stdout and "CPU:1" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(example, tmp_path):
    if "tfdist.horovod" in example.read_text():
        pytest.importorskip("horovod", reason="Horovod is not installed (`make horovod`)")
    done = run(example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"'accuracy': ([\d.]+)", done.stdout)[-1]) > 0.8


def test_a_wheel_has_every_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [*(ROOT / "tfdist").glob("*"), *(ROOT / "tfdist").glob("*/*")]  # `**` does not follow links
    found = [folder.relative_to(ROOT) for folder in folders if (folder / "__init__.py").exists()]
    assert sorted(declared) == sorted(["tfdist", *(".".join(path.parts) for path in found)])


@pytest.mark.parametrize("name", WITH_SYNOPSIS)
def test_a_synopsis_is_true(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed


@pytest.mark.parametrize("document", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.name)
def test_a_document_links_to_files_that_exist(document):
    links = re.findall(r"\]\((?!http)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def literal_sentences():
    """The text of all strings in the product, with `...` for what is filled in."""
    for path in [*(ROOT / "tfdist").rglob("*.py"), *(ROOT / "strategies").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_the_messages_that_the_page_on_troubleshooting_explains_are_those_of_the_product():
    said = "\n".join(" ".join(sentence.replace("`", "").split()) for sentence in literal_sentences())
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").partition("## Speed")[0]
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ") and "`" in row.split("|")[1]]
    fragments = [
        part.strip(" ,") for cell in cells for span in re.findall("`(.*?)`", cell) for part in span.split("...")
    ]
    missing = [part for part in fragments if len(part) > 3 and part not in said and not hasattr(tfdist.errors, part)]
    assert len(fragments) > 20
    assert not missing
