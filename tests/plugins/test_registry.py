"""Discovery by entry points, and what goes wrong with plugins. Distributions are made in a folder on sys.path."""

import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fakes import TASK
from pydantic import BaseModel

from agentrl import Environment, Reward, Sample, Task, Tool, UserError
from agentrl.cli.main import run
from agentrl.errors import call_plugin
from agentrl.plugins.environment import LazyTasks
from agentrl.plugins.registry import find, installed, load, make_environment, make_tool, tasks_of
from agentrl.plugins.reward import make_reward
from agentrl.recipe.sections.env import EnvSection, RewardSection, ToolSection

MODULE = """
from agentrl import Environment, Task, Tool, tool

@tool
def double(x: int) -> int:
    "Double it."
    return 2 * x

class Counter(Tool):
    name = "counter"
    def __init__(self, start: int, names: tuple[str, ...] = (), *, step: float = 1.0):
        if start < 0:
            raise ValueError("start must be 0 or more")
        self.start, self.names, self.step = start, names, step
    async def execute(self, session, **arguments):
        return "1"

class Open(Tool):
    name = "open"
    def __init__(self, **options):
        self.options = options
    async def execute(self, session, **arguments):
        return ""

class Nameless(Tool):
    async def execute(self, session, **arguments):
        return ""

class Room(Environment):
    name = "room"
    def __init__(self, source: str, size: int = 1):
        self.source, self.size = source, size
    def tasks(self, split):
        return [Task("t", {})]
    async def create(self, session, **create_kwargs):
        return []
    async def calc_reward(self, session, **kwargs):
        return 0.0

class NoSource(Room):
    def __init__(self, size: int = 1):
        pass

not_a_tool = 3
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Makes an installed distribution `name` with a module and entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)

    def make(name: str, module: str, points: dict[str, dict[str, str]], version: str = "1.2") -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(module))
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in given.items()) for group, given in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))

    yield make
    for module in set(sys.modules) - modules:
        del sys.modules[module]


@pytest.fixture
def plugins(distribution):
    names = ("double", "Counter", "Open", "Nameless", "not_a_tool")
    tools = {name.lower(): f"demo_plugins:{name}" for name in names}
    envs = {"room": "demo_plugins:Room", "nosource": "demo_plugins:NoSource", "wrong": "demo_plugins:double"}
    distribution("demo_plugins", MODULE, {"agentrl.tools": tools, "agentrl.envs": envs})


def test_what_ships_is_found_like_a_strangers():
    found = {p.name: p for p in installed("tools")}
    assert {"calculator", "calc_gsm8k_reward"} <= found.keys()
    assert found["calculator"].distribution == "agentrl"
    assert "gsm8k" in [p.name for p in installed("agentrl.envs")]


def test_listing_imports_nothing(plugins):
    names = [p.name for p in installed("tools")]
    assert names == sorted(names)
    assert "counter" in names
    assert "demo_plugins" not in sys.modules


def test_what_is_installed_meanwhile_is_found(distribution):
    assert "late" not in [p.name for p in installed("tools")]
    distribution("late", "", {"agentrl.tools": {"late": "late:tool"}})
    assert find("tools", "late").origin == "late 1.2 (late:tool)"


def test_where_a_plugin_comes_from(plugins):
    assert find("tools", "double").origin == "demo_plugins 1.2 (demo_plugins:double)"
    assert find("tools", "demo_plugins:double").origin == "demo_plugins:double"


def test_a_decorated_tool_is_used_as_it_is(plugins):
    made = make_tool(ToolSection(name="double"))
    assert isinstance(made, Tool)
    assert made(4) == 8
    with pytest.raises(UserError, match=r"^tools.double.args: it is a function and takes none, got x$"):
        make_tool(ToolSection(name="double", args={"x": 1}))


def test_a_class_is_called_with_its_arguments(plugins):
    made = make_tool(ToolSection(name="counter", args={"start": 2, "names": ["a"], "step": 2}))
    assert (made.start, made.names, made.step) == (2, ("a",), 2.0)
    assert make_tool(ToolSection(name="open", args={"any": 1})).options == {"any": 1}


def test_an_import_path_will_do(plugins):
    assert make_tool(ToolSection(name="demo_plugins:Counter", args={"start": 1})).start == 1


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("countr", {}, r"^no tool 'countr' is installed; did you mean 'counter'"),
        ("counter", {}, r"^tools.counter.args.start: Counter needs it, and it is missing$"),
        ("counter", {"strt": 1}, r"^tools.counter.args.strt: Counter takes no such argument; did you mean 'start'"),
        ("counter", {"start": "x"}, r"^tools.counter.args.start: should be a valid integer, got 'x'$"),
        ("counter", {"start": 1, "names": ["a", 3]}, r"^tools.counter.args.names.1: should be a valid string, got 3$"),
        ("counter", {"start": -1}, r"refuses its arguments: ValueError: start must be 0 or more$"),
        ("nameless", {}, r"^tool 'nameless': its class sets no `name`$"),
        ("not_a_tool", {}, r"^tool 'not_a_tool' is of type int; expected a Tool class or a @tool function$"),
        ("demo_plugins:Room", {"source": "x"}, r"is the class Room; expected a Tool class"),
        ("demo_plugins:Countr", {}, r"'demo_plugins' has no 'Countr'; did you mean 'Counter'"),
        ("nowhere.at_all:X", {}, r"cannot be imported from 'nowhere.at_all': ModuleNotFoundError"),
    ],
)
def test_a_mistake_is_one_line(plugins, name, args, words):
    with pytest.raises(UserError, match=words) as error:
        make_tool(ToolSection(name=name, args=args))
    assert "\n" not in str(error.value)


def test_a_package_that_an_extra_brings_is_named_with_the_extra(distribution):
    distribution("demo", "demo_extra", {"agentrl.tools": {"far": "demo_extra:Far [remote]"}})
    (Path(sys.path[0]) / "demo_extra.py").write_text("import no_such_package_here\n")
    with pytest.raises(UserError, match=r"No module named 'no_such_package_here': pip install 'demo\[remote\]'$"):
        make_tool(ToolSection(name="far"))


class Scale(BaseModel):
    """factor: what a number is multiplied by."""

    factor: int
    names: tuple[str, ...] = ()


@dataclass
class Plan:
    factor: int
    names: tuple[str, ...] = ()


class Model(Tool):
    name = "model"

    def __init__(self, config: Scale) -> None:
        self.config = config

    async def execute(self, session, **arguments):
        return ""


class Plain(Model):
    def __init__(self, plan: Plan) -> None:
        self.config = plan


class World(Environment):
    name = "world"

    def __init__(self, source: str, config: Scale) -> None:
        self.source, self.config = source, config

    tasks = create = calc_reward = None


class Judge(Reward):
    name = "judge"

    def __init__(self, config: Scale) -> None:
        self.config = config

    async def score(self, sample):
        return float(self.config.factor)


def judge(sample, config: Plan) -> float:
    return float(config.factor)


def make(name, args):
    """The plugin of this module, and the key of its arguments in a recipe."""
    path = f"{__name__}:{name}"
    if name == "World":
        return make_environment(EnvSection(name=path, source="here", args=args)), "env.args"
    if name in ("Judge", "judge"):
        return make_reward(RewardSection(name=path, args=args), "rewards.functions.0.args"), "rewards.functions.0.args"
    return make_tool(ToolSection(name=path, args=args)), f"tools.{path}.args"


@pytest.mark.parametrize("name", ["Model", "Plain", "World", "Judge", "judge"])
async def test_one_typed_object_may_hold_all_arguments(name):
    made, where = make(name, {"factor": 2, "names": ["a"]})
    config = made._args["config"] if name == "judge" else made.config
    assert (type(config), config.factor, config.names) == (Plan if name in ("Plain", "judge") else Scale, 2, ("a",))
    if name in ("Judge", "judge"):
        assert await made.score(Sample(Task("t", {}), ())) == 2.0
    for args, words in (
        ({}, ".factor: .* needs it, and it is missing$"),
        ({"faktor": 1}, ".faktor: .* takes no such argument; did you mean 'factor'"),
        ({"factor": "x"}, ".factor: should be a valid integer, got 'x'$"),
        ({"factor": 1, "names": [1]}, ".names.0: should be a valid string, got 1$"),
    ):
        with pytest.raises(UserError, match=re.escape(where) + words):
            make(name, args)


def test_environments(plugins):
    made = make_environment(EnvSection(name="room", source="here", args={"size": 2}))
    assert isinstance(made, Environment)
    assert (made.source, made.size) == ("here", 2)


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("rom", {}, r"^no environment 'rom' is installed; did you mean 'room'"),
        ("room", {"sise": 2}, r"^env.args.sise: Room takes no such argument; did you mean 'size'\?$"),
        ("room", {"size": "big"}, r"^env.args.size: should be a valid integer, got 'big'$"),
        ("room", {"source": "x"}, r"^env.args.source: give it as env.source$"),
        ("wrong", {}, r"expected an Environment class"),
    ],
)
def test_a_mistake_with_an_environment_is_one_line(plugins, name, args, words):
    with pytest.raises(UserError, match=words) as error:
        make_environment(EnvSection(name=name, args=args))
    assert "\n" not in str(error.value)


def test_a_name_that_two_distributions_offer(plugins, distribution):
    distribution("other_plugins", MODULE, {"agentrl.tools": {"double": "other_plugins:double"}})
    with pytest.raises(UserError, match=r"offered by demo_plugins 1.2 .* and other_plugins 1.2 .*: uninstall one"):
        load("tools", "double")
    assert make_tool(ToolSection(name="other_plugins:double"))(2) == 4
    assert load("tools", "open").__name__ == "Open"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import torch; torch.set_grad_enabled(False)", "it changed torch.set_grad_enabled for the whole process"),
        ("from agentrl import tool\n@tool\ndef f(x): 'Doc.'", "parameter 'x' has no type annotation"),
        ("", "has no 'thing'"),
    ],
)
def test_a_plugin_that_fails_to_import_breaks_only_who_names_it(plugins, distribution, module, words):
    distribution("broken_plugins", module, {"agentrl.tools": {"thing": "broken_plugins:thing"}})
    assert "thing" in {p.name for p in installed("tools")}
    assert make_tool(ToolSection(name="double"))(1) == 2
    with pytest.raises(UserError, match=words) as error:
        make_tool(ToolSection(name="thing"))
    assert "tool 'thing' of broken_plugins 1.2" in str(error.value)
    assert "\n" not in str(error.value)


class Failing(Environment):
    def __init__(self, source: str = "generated", name: str | None = None) -> None:
        if name is not None:
            self.name = name

    def tasks(self, split):
        if self.name == "empty":
            return []
        if self.name in LAZY:
            return LazyTasks(2, LAZY[self.name])
        if self.name in GIVEN:
            return GIVEN[self.name]()
        raise OSError("the disk\nis gone")

    async def create(self, session, **create_kwargs):
        return ()

    async def calc_reward(self, session, **kwargs):
        return 0.0


LAZY = {"raises": {0: Task("a", {})}.__getitem__, "numbered": lambda i: Task(i, {}), "untyped": lambda i: {"id": "a"}}
GIVEN = {
    "forgetful": lambda: None, "mapped": lambda: {"a": Task("a", {})}, "drained": lambda: iter([Task("a", {})]),
    "dicts": lambda: [Task("a", {}), {"id": "b"}], "twins": lambda: [Task("a", {}), Task("b", {}), Task("a", {})],
}  # fmt: skip
KIND = r"tasks\('\w+'\) returned %s: expected a sequence of Task, such as a list"
BAD_TASKS = [
    ("forgetful", KIND % "nothing"),
    ("mapped", KIND % "dict"),
    ("drained", KIND % "list_iterator"),
    ("dicts", r"task 1 of '\w+' is dict, not a Task"),
    ("twins", r"task 2 of '\w+' has the id of task 0, 'a': give each its own"),
    ("raises", r"task 1 of '\w+' failed: KeyError: 1"),
    ("numbered", r"task 0 of '\w+' has the id 0 of type int: an id is a text"),
    ("untyped", r"task 0 of '\w+' is dict, not a Task"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["check"], ["train"], ["try", "--task", "1"]], ids=lambda words: words[0])
@pytest.mark.parametrize(("name", "words"), BAD_TASKS, ids=[name for name, _ in BAD_TASKS])
def test_a_task_that_cannot_be_had_is_one_line(command, name, words, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"env: {{name: '{__name__}:Failing', args: {{name: {name}}}}}\noutput: {tmp_path / 'run'}\n")
    assert run([command[0], str(recipe), *command[1:]]) == 2
    words = (
        words if command[0] != "try" or name not in LAZY else words.replace("task 0", "task 1").replace("id 0", "id 1")
    )
    assert re.fullmatch(rf"error: environment '{name}': {words}( \(\w+.py:\d+\))?\n", capsys.readouterr().err)


class Unsettling(Failing):
    def __init__(self, source: str = "generated", name: str = "constructor") -> None:
        self.name = name
        if name == "constructor":
            torch.set_grad_enabled(False)

    def tasks(self, split):
        if self.name == "tasks":
            torch.set_default_dtype(torch.float64)
        return LazyTasks(2, self.task)

    def task(self, index):
        torch.set_default_dtype(torch.float64)
        return Task(f"t{index}", {})

    def solved(self, rewards, task):
        torch.set_grad_enabled(False)
        return True


@pytest.mark.parametrize(
    ("name", "do", "words"),
    [
        ("constructor", lambda env: env, r"env.args: Unsettling: it changed torch.set_grad_enabled for the whole"),
        ("tasks", lambda env: tasks_of(env, "train"), r"tasks\('train'\) failed: it changed torch.set_default_dtype"),
        (
            "task",
            lambda env: tasks_of(env, "train")[1],
            r"task 1 of 'train' failed: it changed torch.set_default_dtype",
        ),
        ("solved", lambda env: call_plugin("mine", env.solved, {}, TASK), r"^mine: it changed torch.set_grad_enabled"),
    ],
)
def test_whoever_changes_a_setting_of_torch_is_named_and_it_is_set_back(name, do, words):
    with pytest.raises(UserError, match=words):
        do(make_environment(EnvSection(name=f"{__name__}:Unsettling", args={"name": name})))
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


def rows() -> list[dict[str, str]]:
    return [{"question": "1+1", "answer": "2"}]


def test_a_plain_function_is_no_environment():
    with pytest.raises(UserError, match=r"rows' is a function without the argument `source`; expected an Environment"):
        make_environment(EnvSection(name=f"{__name__}:rows"))


class Lettered(Environment):
    name = "lettered"
    splits = "test"

    def __init__(self, source: str | None = None) -> None:
        pass

    tasks = create = calc_reward = None  # never asked


class Toolless(Lettered):
    splits = ("test",)

    def tools(self):
        return None


class Mistooled(Toolless):
    def tools(self):
        return [rows]


class Untooled(Toolless):
    def tools(self):
        raise OSError("the shed\nis locked")


def sourced(source):
    return rows()


async def awaited(source):
    return rows()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sourced", r"sourced' returned list, not an Environment; name an Environment class"),
        ("awaited", r"awaited' returned coroutine, not an Environment; name an Environment class"),
        ("Toolless", r"Toolless': `tools` returned NoneType; expected a sequence of Tool objects"),
        ("Mistooled", r"Mistooled': `tools` returned function; expected a sequence of Tool objects"),
        ("Untooled", r"Untooled': `tools` raised OSError: the shed is locked"),
        ("Lettered", r"Lettered': `splits` is 'test'; expected a tuple of texts"),
    ],
)
def test_what_is_nearly_an_environment_is_one_line(name, words):
    """`splits = "test"` was four held-out splits of a letter each."""
    with pytest.raises(UserError, match=words):
        make_environment(EnvSection(name=f"{__name__}:{name}"))


def test_an_environment_without_a_name_is_one_line():
    with pytest.raises(UserError, match=rf"^environment '{__name__}:Failing': its class sets no `name`$"):
        make_environment(EnvSection(name=f"{__name__}:Failing"))


@pytest.mark.parametrize("command", ["check", "train", "eval", "try"])
def test_an_environment_that_fails_to_give_tasks_is_one_line(command, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"env: {{name: '{__name__}:Failing', args: {{name: failing}}}}\n")
    assert run([command, str(recipe)]) == 2
    assert capsys.readouterr().err.count("failed: OSError: the disk is gone") == 1


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_an_environment_without_tasks_is_one_line(command, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"env: {{name: '{__name__}:Failing', args: {{name: empty}}}}\n")
    assert run([command, str(recipe)]) == 2
    assert capsys.readouterr().err.startswith("error: environment 'empty' (source generated) has no task")


def test_a_class_without_a_source_is_given_none_unless_a_recipe_names_one(plugins):
    assert make_environment(EnvSection(name="nosource")).name == "room"
    with pytest.raises(UserError, match=r"^env.source: NoSource takes no such argument"):
        make_environment(EnvSection(name="nosource", source="here"))
