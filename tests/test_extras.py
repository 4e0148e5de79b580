"""What an installation elsewhere needs and has: every import is declared, and what is missing is a sentence."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_structure import modules
from tfdist import extras
from tfdist.errors import MissingPackageError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
MOST_MEGABYTES = 150
# Built for the installed TensorFlow, or bound to a GPU's libraries: `tfdist doctor` says how.
IN_NO_EXTRA = {"horovod", "nvidia"}


def named(lines):
    """The distributions that requirements name, with those of the extras of tfdist that they refer to."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "tfdist":
            yield from (name for extra in requirement.extras for name in named(EXTRAS[extra]))
        else:
            yield canonicalize_name(requirement.name)


def imported(tree):
    """The top-level modules that a source imports when it runs, with the extra of the context that they are in."""

    def visit(node, extra):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.With) and "importing(" in ast.unparse(node.items[0]):
            extra = node.items[0].context_expr.args[0].value
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], extra) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0], extra
        for child in ast.iter_child_nodes(node):
            yield from visit(child, extra)

    return set(visit(tree, None))


def test_each_import_is_of_a_declared_package_or_in_a_context_that_names_its_extra():
    distributions = importlib.metadata.packages_distributions()
    required = set(named(PROJECT["dependencies"]))
    # These are imported by `tfdist.report` alone, in such a context.
    pages = {"tfdist.study.page", "tfdist.study.charts"}
    undeclared = []
    for name, path in modules().items():
        for module, context in imported(ast.parse(path.read_text(encoding="utf-8"))):
            extra = context or ("report" if name in pages else "mpi" if module == "mpi4py" else None)
            known = required | set(named(EXTRAS[extra]) if extra else ())
            names = {canonicalize_name(each) for each in distributions.get(module, [module])}
            if module not in sys.stdlib_module_names | {"tfdist"} | IN_NO_EXTRA and not names & known:
                undeclared.append((name, module))
    assert not undeclared


def closure(*names):
    """The installed distributions that `pip install` of these installs."""
    result, left = {}, list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name not in result:
            result[name] = importlib.metadata.distribution(name)
            requirements = map(Requirement, result[name].requires or [])
            left += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return result


def test_a_slim_install_is_small_beside_tensorflow():
    tensorflow = closure("tensorflow", "keras")
    added = [each for name, each in closure(*named(PROJECT["dependencies"])).items() if name not in tensorflow]
    paths = [Path(file.locate()) for distribution in added for file in distribution.files]
    paths += [path for folder in ("tfdist", "models", "strategies") for path in (ROOT / folder).rglob("*.*")]
    assert added and sum(path.stat().st_size for path in paths if path.is_file()) < MOST_MEGABYTES * 1e6


def test_importing_tfdist_imports_no_other_package():
    code = """
import sys
before = set(sys.modules)
import tfdist
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tfdist"]


def test_a_missing_package_is_a_sentence_with_the_command_that_installs_its_extra():
    with pytest.raises(MissingPackageError) as caught, extras.importing("train", "The dataset"):
        import no_such_package.inner  # noqa: F401
    assert str(caught.value) == (
        "The dataset needs the package `no_such_package`, which is not installed\n\nhint: run "
        "`pip install 'importlib_resources>=6' 'matplotlib>=3.10' 'sacrebleu>=2.6' 'scikit-learn>=1.7' "
        "'tensorflow-datasets>=4.9.10'`"
    )
    with pytest.raises(ModuleNotFoundError), extras.importing("train", "The dataset"):
        import tfdist.no_such_module  # noqa: F401


@pytest.mark.parametrize("path", ["README.md", "docs", "tfdist", "models", "strategies", "examples"])
def test_nothing_says_to_install_tfdist_from_an_index(path):
    files = [ROOT / path] if path.endswith(".md") else [each for each in (ROOT / path).rglob("*.*") if each.is_file()]
    for file in files:
        for line in file.read_text(encoding="utf-8", errors="ignore").splitlines():
            assert not re.search(r"(?<!never )`?pip install ['\"]?tfdist|install `tfdist\[", line), (file, line)


def pins(lock):
    return set(re.findall(r"^(\S+==\S+)", (ROOT / lock).read_text(encoding="utf-8"), re.MULTILINE))


def test_the_locks_agree_have_every_declared_package_and_name_no_host():
    environment, integrations = pins("requirements.lock"), pins("requirements-integrations.lock")
    assert environment < integrations
    for lines, locked in (
        (PROJECT["dependencies"] + EXTRAS["dev"], environment),
        (EXTRAS["integrations"], integrations),
    ):
        assert set(named(lines)) <= {canonicalize_name(pin.partition("==")[0]) for pin in locked}
    for lock in ("requirements.lock", "requirements-integrations.lock"):
        assert "://" not in (ROOT / lock).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_a_dockerfile_copies_what_pip_install_needs(name):
    lines = (ROOT / "docker" / name).read_text(encoding="utf-8").splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    assert {"pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "tfdist", "models", "strategies"} < set(
        copied
    )
    assert all((ROOT / source).exists() for source in copied)
    (tensorflow,) = (pin.partition("==")[2] for pin in pins("requirements.lock") if pin.startswith("tensorflow=="))
    image = next(line for line in lines if line.startswith("FROM "))
    assert "python:3.12" in image or image == f"FROM tensorflow/tensorflow:{tensorflow}-gpu"


def test_the_description_of_the_package_has_no_link_that_leads_nowhere():
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    assert "](" not in text and all((ROOT / name).exists() for name in re.findall(r"`(\S+\.md)`", text))


# Elsewhere: the package as pip installs it, without an extra, and without a checkout.


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The Python of a virtual environment that has TensorFlow and what `pip install .` installs, and no more."""
    folder = tmp_path_factory.mktemp("elsewhere")
    source = folder / "source"
    source.mkdir()
    for name in ("tfdist", "models", "strategies"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", PROJECT["readme"], "LICENSE"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "v"], check=True)
    (packages,) = (folder / "v").glob("lib/python*/site-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", packages, source], check=True, capture_output=True)
    for distribution in closure("tensorflow", "keras", *named(PROJECT["dependencies"])).values():
        for file in distribution.files:
            # `google` is a folder of several distributions.
            part = Path(*file.parts[: 2 if file.parts[0] == "google" else 1])
            if ".." not in file.parts and not (packages / part).exists():
                (packages / part).parent.mkdir(exist_ok=True)
                (packages / part).symlink_to(Path(distribution.locate_file(part)).resolve())
    shutil.rmtree(source)
    return folder / "v" / "bin" / "python"


def run(python, *arguments, cwd):
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(cwd), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [python, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


OWN = """
import keras
import numpy as np
import tfdist
from tfdist.data import DataSpec, Source
from tfdist.data.input.arrays import Arrays


def load(data_dir=None):
    x = np.random.default_rng(0).random((64, 8)).astype("float32")
    examples = {"train": 64, "validation": 64, "test": 64}
    spec = DataSpec("mine", "classification", (8,), examples=examples, classes=2)
    return Source(spec, lambda split, count: (x[:count], (x.sum(1) > 4).astype("int64")[:count]))


def main():
    strategy = tfdist.strategy("mirrored", devices=2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    strategy.prepare(model)
    x = np.ones((30, 8), "float32")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    print("trained")


if __name__ == "__main__":
    main()
"""


@pytest.mark.thorough
def test_the_package_is_complete_elsewhere(elsewhere):
    (packages,) = elsewhere.parent.parent.glob("lib/python*/site-packages")
    for folder, inside in (("tfdist", "tfdist"), ("models", "tfdist/models"), ("strategies", "tfdist/strategies")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert (packages / inside / path.relative_to(ROOT / folder)).is_file(), path


@pytest.mark.thorough
def test_a_script_and_the_command_train_elsewhere_without_an_extra(elsewhere, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    assert run(elsewhere, "mine.py", cwd=tmp_path).stdout.split() == ["trained"]
    options = ["--strategy", "custom", "--model", "mlp", "--dataset", "mine:load", "--epochs", "1"]
    done = run(elsewhere, "-m", "tfdist", "train", *options, "--run-dir", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "curves.png` cannot be written, and the run continues without it: The picture needs" in done.stderr
    assert (tmp_path / "run" / "run.json").exists() and "pip install" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["train", "--strategy", "single", "--model", "mlp", "--dataset", "digits"],
            "The dataset `digits` needs the package `scikit-learn`",
        ),
        (
            ["train", "--strategy", "single", "--model", "mlp", "--dataset", "mnist"],
            "needs the package `tensorflow_datasets`",
        ),
        (
            ["train", "--strategy", "single", "--model", "mlp", "--dataset", "digits", "--profile", "1:2"],
            "`--profile` needs the package",
        ),
        (["compare", "--strategies", "single"], "The report of `tfdist compare` needs the package `altair`"),
        (["advise", "--model", "mlp", "--dataset", "digits"], "An interval needs the package `scipy`"),
        (["report", "."], "The report needs the package `altair`"),
        (["train", "--strategy", "horovod", "--model", "mlp", "--dataset", "digits", "--workers", "2"], "`horovod`"),
        (["train", "--strategy", "mpi", "--model", "mlp", "--dataset", "digits", "--workers", "2"], "`mpi4py`"),
    ],
)
def test_what_is_missing_elsewhere_is_a_sentence_whose_hint_works_there(elsewhere, tmp_path, arguments, said):
    done = run(elsewhere, "-m", "tfdist", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and "which is not installed\n" in done.stderr
    hint = done.stderr.rpartition("hint: ")[2]
    assert "make " not in hint and "tfdist[" not in hint
    if "horovod" in arguments:
        _, script, environment = re.search("`(bash) (.*) (.*)`", hint).groups()
        assert Path(script).is_file() and Path(environment) == elsewhere.parent.parent
    else:
        assert "hint: run `pip install " in done.stderr


@pytest.mark.thorough
def test_the_commands_and_the_doctor_answer_elsewhere(elsewhere, tmp_path):
    assert "train" in run(elsewhere, "-m", "tfdist", "--help", cwd=tmp_path).stdout
    done = run(elsewhere, "-m", "tfdist", "doctor", cwd=tmp_path)
    assert "make horovod" not in done.stdout and "tfdist[" not in done.stdout
    said = " ".join(done.stdout.split())
    assert "install_horovod.sh" in said and "mpi4py>=4" in said
    assert "Datasets by name and the pictures of runs need importlib_resources, which is not installed" in said
