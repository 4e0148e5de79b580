"""The options of a strategy are declared once, in its constructor: commands read them there without TensorFlow."""

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfdist
from tfdist import strategies, train
from tfdist.errors import UsageError
from tfdist.jobs.world import World
from tfdist.run import config as configs

ROOT = Path(__file__).parent.parent


def accepted(constructor):
    """The names of all arguments that a class takes, its base classes' among them."""
    names = set()
    for base in inspect.getmro(constructor):
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
            if not any(one.kind is one.VAR_KEYWORD for one in parameters):
                break
    return names


# What a strategy passes to its base class itself, so that a user cannot.
SET_BY_THE_STRATEGY = {
    "gossip": {"same_settings"},
    "local_sgd": {"same_settings"},
    "mpi_split": {"same_settings", "engine"},
}


@pytest.mark.parametrize("name", strategies.names())
def test_the_options_that_are_read_from_the_source_are_those_of_the_class(name):
    constructor = importlib.import_module(f"tfdist.strategies.{name}").STRATEGY
    of_classes = accepted(constructor) | accepted(constructor.of_job(World(world_size=2)))
    assert set(strategies.signature(name).options) == of_classes - SET_BY_THE_STRATEGY.get(name, set())


def test_what_a_strategy_sets_for_its_base_class_is_refused_in_a_sentence():
    with pytest.raises(UsageError, match="The strategy `mpi_split` does not know the option `engine`"):
        strategies.signature("mpi_split").check("mpi_split", {"engine": "sockets"})


@pytest.mark.parametrize("name", strategies.names())
def test_all_options_are_known_before_the_start(name):
    assert strategies.signature(name).complete
    with pytest.raises(UsageError, match=f"The strategy `{name}` does not know the option `micro_batch`") as refused:
        strategies.signature(name).check(name, {"micro_batch": 2})
    assert "job_settings" not in str(refused.value)  # which the command sets


@pytest.mark.parametrize("name", strategies.names())
def test_each_option_is_described_where_it_is_declared(name):
    undescribed = {option.name for option in strategies.signature(name).options.values() if not option.help}
    assert not undescribed


OPTION_TABLES = runpy.run_path(str(ROOT / "scripts" / "option_tables.py"))


def test_the_tables_of_options_in_the_pages_follow_from_the_constructors():
    pages = OPTION_TABLES["pages"]()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run `python scripts/option_tables.py`"
    listed = set(re.findall(r"^\| `(\w+)` \|", "".join(pages.values()), re.MULTILINE))
    options = {option.name for name in strategies.names() for option in OPTION_TABLES["options_of"](name)}
    assert options <= listed


def test_the_tables_that_are_written_by_hand_name_options_of_the_strategies():
    known = {option for name in strategies.names() for option in strategies.signature(name).options}
    tables = re.findall(r"^\| option \|.*\n((?:\|.*\n)*)", (ROOT / "docs" / "gpus.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"^\| `(\w+)` \|", "".join(tables), re.MULTILINE))
    assert {"devices", "communication"} <= named <= known


def test_the_docstring_of_the_first_function_lists_every_strategy():
    listed = re.findall(r'^    \| "(\w+)" \|', tfdist.strategy.__doc__, re.MULTILINE)
    assert sorted(listed) == strategies.names()


def test_help_says_which_strategies_take_an_option_and_what_it_does():
    shown = " ".join(CliRunner().invoke(train.command, ["--help"]).output.split())
    assert "--shard NAME horovod, mpi, multiworker: " in shown
    for name in configs.STRATEGY_FLAGS:
        assert strategies.taking(name), f"no strategy takes `{name}`"


USERS = """
import tfdist.strategies.custom as theirs
from tfdist.strategies import base

class Plain(base.Strategy):
    name = "plain"

class Periodic(theirs.CustomStrategy):
    '''Meets at times.

    Args:
        sync_every: steps between meetings.
        options: others.
    '''

    def __init__(self, *, sync_every: int = 2, **options):
        super().__init__(**options)

class Chosen(base.Strategy):
    @classmethod
    def of_job(cls, world):
        return ChosenInJob if world.world_size > 1 else cls

class ChosenInJob(Chosen):
    def __init__(self, *, patience: int = 1, **options):
        super().__init__(**options)

class Made(len.__class__):
    pass

class Unclear(base.Strategy):
    @classmethod
    def of_job(cls, world):
        return super().of_job(world)

class Typed(base.Strategy):
    def __init__(self, *, odd: os.nothing = 1, later: "Unknown | None" = None, limit: int = 1, **options):
        super().__init__(**options)
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    (tmp_path / "of_a_user.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)


def test_options_of_a_users_class_are_found_through_its_imports(users_module):
    options = strategies.signature("of_a_user:Periodic").options
    assert options["sync_every"].help == "steps between meetings"
    assert {"speeds", "devices", "seed"} <= options.keys()
    assert configs.with_flags("of_a_user:Periodic", {}, {"sync_every": "3"}) == {"sync_every": "3"}


def test_a_flag_that_a_users_class_does_not_take_is_refused_with_what_to_do(users_module):
    with pytest.raises(UsageError, match="give the class an argument `sync_every`, or leave it out"):
        configs.with_flags("of_a_user:Plain", {}, {"sync_every": "3"})


def test_the_options_of_the_class_that_of_job_returns_are_known(users_module):
    signature = strategies.signature("of_a_user:Chosen")
    assert signature.complete
    assert "patience" in signature.options
    assert not strategies.signature("of_a_user:Unclear").complete


def test_an_annotation_that_is_no_type_here_is_left_to_the_class(users_module):
    signature = strategies.signature("of_a_user:Typed")
    signature.check("of_a_user:Typed", {"odd": "x", "later": "y", "limit": "2"})
    with pytest.raises(UsageError, match="cannot have `few` as `limit`"):
        signature.check("of_a_user:Typed", {"odd": "x", "limit": "few", "seed": "none"})


def test_reading_the_options_of_tfdists_strategies_makes_no_folder_importable(tmp_path):
    code = "import sys, os; before = list(sys.path); from tfdist import train; assert sys.path == before, sys.path"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True, timeout=60)


def test_a_class_without_a_source_is_left_to_answer_itself(users_module):
    assert not strategies.signature("of_a_user:Made").complete
    assert not strategies.signature("nowhere:Mine").complete
    assert configs.with_flags("of_a_user:Made", {}, {"sync_every": "3"}) == {"sync_every": "3"}


def test_a_pipeline_takes_the_options_of_its_processes_in_a_job():
    assert configs.with_flags("pipeline", {}, {"timeout_seconds": "9"}) == {"timeout_seconds": "9"}
    with pytest.raises(UsageError, match="`--shard` is set, but `pipeline` does not take it"):
        configs.with_flags("pipeline", {}, {"shard": "optimizer"})
    with pytest.raises(UsageError, match="cannot have `soon` as `timeout_seconds`"):
        strategies.signature("pipeline").check("pipeline", {"timeout_seconds": "soon"})


def test_a_pipeline_declares_its_options_once():
    constructor = importlib.import_module("tfdist.strategies.pipeline").STRATEGY
    classes = {*constructor.__mro__, *constructor.of_job(World(world_size=2)).__mro__} - {object}
    declaring = [one for one in classes if "micro_batches" in inspect.signature(one.__init__).parameters]
    assert len({one.__init__ for one in declaring}) == 1
