"""The structure of the package: what imports what, read from the source. Imports in functions and for types count."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AT_THE_TOP = {
    "__init__",
    "__main__",
    "advise",
    "catalogue",
    "compare",
    "errors",
    "extras",
    "files",
    "redaction",
    "launch",
    "machine",
    "memory",
    "notebook",
    "options",
    "profile",
    "ray",
    "registry",
    "report",
    "simulate",
    "spark",
    "startup",
    "terminal",
    "train",
    "verify",
    "world",
}


LONGEST_FUNCTION = 60  # lines

# "module:attribute", of which the module is imported when it is needed.
PLACE = re.compile(r"[\w.]+:\w+")


def modules():
    """The path of each module of the package, by its dotted name."""
    found = {}
    for folder, package in {"tfdist": "tfdist", "models": "tfdist.models", "strategies": "tfdist.strategies"}.items():
        for path in (ROOT / folder).rglob("*.py"):  # which does not follow the links to the other two
            name = ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(path, known):
    """The modules among `known` that the code at `path` imports, anywhere."""

    def visit(node):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PLACE.fullmatch(node.value):
            yield node.value.partition(":")[0]
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    return {name for name in visit(ast.parse(path.read_text(encoding="utf-8"))) if name in known}


def graph():
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def room(name):
    """The folder that a module is in; a module at the top of the package, or of `data`, is a room of its own."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[1:2] == ["data"] else ".".join(parts[:2])


def circle(edges):
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return " -> ".join(error.args[1])
    return ""


@pytest.fixture(scope="module")
def house():
    return graph()


def test_no_files_import_each_other_in_a_circle(house):
    assert len(house) > 150
    assert not circle(house)


@pytest.fixture(scope="module")
def rooms(house):
    """The rooms that each room imports from."""
    found = {}
    for name, imported in house.items():
        found.setdefault(room(name), set()).update({room(other) for other in imported} - {room(name)})
    return found


def test_the_picture_in_contributing_is_that_of_the_code(rooms):
    """A room stands one floor above the highest room that it imports from."""
    floors = []
    left = dict(rooms)
    while left:
        floor = sorted(name for name, imported in left.items() if not imported & set(left))
        floors.append(", ".join(name.removeprefix("tfdist.") for name in floor))
        left = {name: imported for name, imported in left.items() if name not in floor}
    picture = "\n".join(reversed(floors))
    assert picture in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), f"put this there:\n{picture}"


def test_no_rooms_import_each_other_in_a_circle(rooms):
    assert {"tfdist.loop", "tfdist.jobs", "tfdist.strategies"} <= set(rooms)
    assert not circle(rooms)


def test_few_modules_stand_at_the_top():
    assert {path.stem for path in (ROOT / "tfdist").glob("*.py")} == AT_THE_TOP


@pytest.mark.parametrize("folder", ["jobs", "launcher"])
def test_what_starts_and_watches_processes_loads_no_tensorflow_at_its_top(folder):
    for path in (ROOT / "tfdist" / folder).rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {"tensorflow", "keras"} & {name.split(".")[0] for name in names}, path


def private_attributes(tree):
    """The attributes with one underscore in front that a source reads or sets, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            yield node.attr, node.lineno


def own_names(tree):
    """What a source defines itself: functions, names, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_private_attributes_of_keras_and_tensorflow_are_in_internals_alone():
    outside = {name: path for name, path in modules().items() if not name.startswith("tfdist.internals.")}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in outside.values()}
    own = {name for tree in trees.values() for name in own_names(tree)} | {"_exit"}  # of `os`
    foreign = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        for name, line in private_attributes(tree)
        if name not in own
    ]
    assert not foreign


def test_strategies_and_models_are_catalogues():
    """One file for each, and no helpers beside them."""
    assert not [path.name for path in (ROOT / "strategies").glob("_*.py") if path.name != "__init__.py"]


def test_functions_are_short():
    long = {
        f"{name}.{node.name}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    }
    assert not long
