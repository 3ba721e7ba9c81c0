"""Plugins are found by entry points, and what ships is found like a stranger's package.

`installed` imports nothing. A plugin is imported when something names it: a broken one breaks only who names it.
Wherever a name is wanted, an import path `package.module:attribute` will do.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from agentrl.errors import (
    PlainError,
    StateChangedError,
    UserError,
    call_plugin,
    check_settings,
    contained,
    describe,
    nearest,
    torch_settings,
)
from agentrl.plugins.environment import Environment, LazyTasks
from agentrl.plugins.mixture import Mixture
from agentrl.plugins.tool import Tool, ToolSource
from agentrl.plugins.tracker import Tracker
from agentrl.plugins.types import Json, Task
from agentrl.recipe.secrets import is_secret, masked
from agentrl.recipe.sections.env import EnvPart, EnvSection, ToolSection
from agentrl.recipe.sections.rollout import EngineSection
from agentrl.recipe.sections.track import TrackerSection
from agentrl.recipe.sections.workspace import WorkspaceSection
from agentrl.secrets import MASK
from agentrl.workspace.provider import WorkspaceProvider

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin:
    """`name` in `group` (such as `agentrl.tools`) stands for `value`, in `module:attribute` form.

    distribution and version are empty where it was named by an import path.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def origin(self) -> str:
        """Where it comes from, for people."""
        return f"{self.distribution} {self.version} ({self.value})" if self.distribution else self.value


def installed(group: str) -> list[Plugin]:
    """What is installed in a group (`tools` or `agentrl.tools`), by name. Nothing is imported."""
    return list(_installed(_full(group), tuple((os.path.abspath(folder), _changed(folder)) for folder in sys.path)))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _installed(group: str, folders: tuple[tuple[str, int], ...]) -> list[Plugin]:
    """The plugins of a group. folders: those of `sys.path`, and when something was installed there last: to read
    what all packages say takes long."""
    points = entry_points(group=group)
    packages = {id(ep.dist): ep.dist for ep in points}
    named = {key: (dist.name, dist.version) if dist else ("?", "?") for key, dist in packages.items()}
    found = [Plugin(group, ep.name, ep.value, *named[id(ep.dist)]) for ep in points]
    return sorted(found, key=lambda p: (p.name, p.distribution))


def find(group: str, name: str) -> Plugin:
    """The one plugin that `name` stands for, not imported. Raises UserError: unknown, or offered twice."""
    if ":" in name:
        return Plugin(_full(group), name, name, "", "")
    found = installed(group)
    matches = [p for p in found if p.name == name]
    if not matches:
        raise UserError(f"no {_kind(group)} {name!r} is installed{nearest(name, {p.name for p in found})}")
    if len(matches) > 1:
        offers = " and ".join(p.origin for p in matches)
        raise UserError(
            f"{_kind(group)} {name!r} is offered by {offers}: uninstall one, or name it as module:attribute"
        )
    return matches[0]


def load(group: str, name: str) -> Any:
    """The object that `name` stands for. Raises UserError: unknown, offered twice, or failing to import."""
    plugin = find(group, name)
    of = f" of {plugin.distribution} {plugin.version}" if plugin.distribution else ""
    return load_path(plugin.value, f"{_kind(group)} {name!r}{of}", plugin.distribution)


def load_path(path: str, what: str, distribution: str = "") -> Any:
    """Import `module:attribute`, or `module:attribute [extra]` of an entry point. `what` begins the message of the
    UserError, which names the extra where a package is missing. distribution: whose extra that is."""
    module, _, attribute = path.partition(":")
    attribute, _, extra = map(str.strip, attribute.rstrip("] ").partition("["))
    settings = torch_settings()
    try:
        value: Any = import_module(module.strip())
        check_settings(settings)
    except (Exception, SystemExit) as error:  # the boundary: a module may raise anything
        missing = isinstance(error, ModuleNotFoundError) and extra and distribution
        hint = f": pip install '{distribution}[{extra}]'" if missing else ""
        raise UserError(f"{what} cannot be imported from {module!r}: {describe(error, place=False)}{hint}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UserError(f"{what}: {module!r} has no {attribute!r}{nearest(part, _public(value))}")
        value = getattr(value, part)
    return value


def make_tool(section: ToolSection) -> Tool | ToolSource:
    """A tool, or a source of tools, as a recipe names it: a `@tool` object as it is, a class (or factory) called
    with `args`."""
    made = load("tools", section.name)
    if isinstance(made, Tool):
        if section.args:
            raise UserError(
                f"tools.{section.name}.args: it is a function and takes none, got {', '.join(section.args)}"
            )
    elif _makes(made, (Tool, ToolSource)):
        made = construct(made, section.args, f"tools.{section.name}.args")
    if isinstance(made, ToolSource):
        return made
    if not isinstance(made, Tool):
        raise UserError(f"tool {section.name!r} is {_type_of(made)}; expected a Tool class or a @tool function")
    check_named(made, f"tool {section.name!r}")
    return made


def tracker_makers(sections: Sequence[TrackerSection]) -> dict[str, Callable[[], Tracker]]:
    """What makes each tracker of a recipe, by name, those of one name numbered. Nothing is made.

    Raises UserError: unknown, or arguments that its class does not take.
    """
    makers: dict[str, Callable[[], Tracker]] = {}
    for section in sections:
        made, where = load("trackers", section.name), f"track.trackers.{section.name}.args"
        if not _makes(made, Tracker):
            raise UserError(f"tracker {section.name!r} is {_type_of(made)}; expected a Tracker class")
        _checked(made, section.args, where)
        number = sum(name.partition(" #")[0] == section.name for name in makers) + 1
        makers[section.name if number == 1 else f"{section.name} #{number}"] = partial(
            construct, made, section.args, where
        )
    return makers


def make_engine(section: EngineSection, model: "PreTrainedModel", **context: object) -> Any:
    """The engine of a recipe: its class called with the model, `max_batch` and `engine.args`.

    context: what else a run knows, given to a class that names it: `model_path`, `tokenizer`, `say`, `phase`,
    `lora`, `cluster`, `devices`, `dtype`, `overlap`, `routing_replay`, `shared`, `workers` and
    `processes`.
    """
    made = load("engines", section.name)
    known = {key: value for key, value in context.items() if key in inspect.signature(made).parameters}
    return construct(made, {**known, "model": model, "max_batch": section.max_batch, **section.args}, "engine.args")


def check_engine(section: EngineSection) -> None:
    """Raise UserError where `engine.args` are not what the engine's class takes. Makes nothing."""
    made = load("engines", section.name)
    _checked(made, section.args, "engine.args", whole=False)


def make_message_engine(section: EngineSection) -> Any:
    """Make an engine that takes messages and brings its own chat: it is given no model."""
    return construct(load("engines", section.name), {"max_batch": section.max_batch, **section.args}, "engine.args")


def make_workspace_provider(section: WorkspaceSection) -> WorkspaceProvider:
    """The provider of a recipe's workspaces: its class called with `workspace.args`."""
    made = load("workspaces", section.provider)
    if not _makes(made, WorkspaceProvider):
        raise UserError(
            f"workspace provider {section.provider!r} is {_type_of(made)}; expected a WorkspaceProvider class"
        )
    provider = construct(made, section.args, "workspace.args")
    if not isinstance(provider, WorkspaceProvider):
        raise UserError(
            f"workspace provider {section.provider!r} returned {type(provider).__name__}, not a WorkspaceProvider"
        )
    check_named(provider, f"workspace provider {section.provider!r}")
    return provider


def make_environment(section: EnvSection) -> Environment:
    """The environment of a recipe, or the mixture of several: a class called with `source` and `env.args`."""
    if section.mix:
        return Mixture([(part, _make_environment(part, f"env.mix.{i}.")) for i, part in enumerate(section.mix)])
    return _make_environment(section, "env.")


def _make_environment(section: EnvSection | EnvPart, where: str) -> Environment:
    made = load("envs", section.name)
    if not _makes(made, Environment):
        raise UserError(f"environment {section.name!r} is {_type_of(made)}; expected an Environment class")
    if "source" in section.args:
        raise UserError(f"{where}args.source: give it as {where}source")
    given = {"source": section.source, **section.args}
    if (
        section.source == type(section).model_fields["source"].default
        and inspect.isclass(made)
        and not _takes(made, "source")
    ):
        del given["source"]  # nobody asked for one
    if inspect.isroutine(made) and not _takes(made, "source"):
        raise UserError(
            f"environment {section.name!r} is a function without the argument `source`; expected an Environment "
            "class, or a function that makes one (rows and a reward are the environment 'dataset')"
        )
    environment = construct(made, given, f"{where}args")
    if isinstance(environment, CoroutineType):
        environment.close()
    if not isinstance(environment, Environment):
        kind = "nothing" if environment is None else type(environment).__name__
        raise UserError(f"environment {section.name!r} returned {kind}, not an Environment; name an Environment class")
    _check_environment(environment, f"environment {section.name!r}")
    return environment


def _check_environment(environment: Environment, what: str) -> None:
    """Raise UserError where its name, its splits or its tools are of another kind than their type says."""
    check_named(environment, what)
    splits = environment.splits
    if isinstance(splits, str) or not isinstance(splits, Sequence) or not all(isinstance(one, str) for one in splits):
        raise UserError(f"{what}: `splits` is {splits!r:.60}; expected a tuple of texts")
    tools = call_plugin(f"{what}: `tools`", environment.tools)
    if not isinstance(tools, Sequence) or (wrong := [one for one in tools if not isinstance(one, Tool)]):
        given = type(wrong[0]).__name__ if isinstance(tools, Sequence) else type(tools).__name__
        raise UserError(f"{what}: `tools` returned {given}; expected a sequence of Tool objects")


def _takes(function: Callable[..., object], name: str) -> bool:
    """Whether a function takes an argument of this name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def check_named(made: object, what: str) -> None:
    """Raise UserError where the class of a plugin sets no name."""
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name:
        raise UserError(f"{what}: its class sets no `name`")


def tasks_of(env: Environment, split: str) -> Sequence[Task]:
    """`env.tasks(split)`, each task checked as it is asked for. Raises UserError, whatever the environment
    raises, then too: nothing can be done without its tasks."""
    what = f"environment {env.name!r}: tasks({split!r})"
    settings = torch_settings()
    try:
        given = env.tasks(split)
        check_settings(settings)
        if isinstance(given, CoroutineType):
            given.close()
        if not isinstance(given, Sized) or isinstance(given, Mapping | str | Set):
            kind = "nothing" if given is None else type(given).__name__
            raise UserError(f"{what} returned {kind}: expected a sequence of Task, such as a list")
        tasks = _Tasks(env.name, split, given)
        if isinstance(given, list | tuple):  # one that is lazy may be long
            for index in range(len(given)):
                tasks.check(index, given[index])
        return tasks
    except UserError:
        raise
    except BaseException as error:  # the boundary: an environment may raise anything
        raise UserError(f"{what} failed: {describe(contained(error), place=False)}") from error


class _Tasks(LazyTasks):
    """The tasks of a split as an environment gives them. Raises UserError for one that raises, is no task, or has
    another's id."""

    def __init__(self, name: str, split: str, tasks: Sequence[Task]) -> None:
        super().__init__(len(tasks), self._task)
        self._name, self._split, self._tasks = name, split, tasks
        self._places: dict[str, int] = {}  # of the ids that were seen

    def _task(self, index: int) -> Task:
        settings = torch_settings()
        try:
            task = self._tasks[index]
            check_settings(settings)
        except UserError:
            raise
        except BaseException as error:  # the boundary: an environment may raise anything
            raise UserError(f"{self._called(index)} failed: {describe(contained(error))}") from error
        return self.check(index, task)

    def _called(self, index: int) -> str:
        return f"environment {self._name!r}: task {index} of {self._split!r}"

    def check(self, index: int, task: object) -> Task:
        """What stands at `index`. Raises UserError for what is no task, or has the id of another."""
        if not isinstance(task, Task):
            raise UserError(f"{self._called(index)} is {type(task).__name__}, not a Task")
        if not isinstance(task.id, str):
            kind = type(task.id).__name__
            raise UserError(f"{self._called(index)} has the id {task.id!r:.60} of type {kind}: an id is a text")
        if not isinstance(task.data, Mapping):
            kind = type(task.data).__name__
            raise UserError(f"{self._called(index)} has data of type {kind}; expected a dictionary")
        if (other := self._places.setdefault(task.id, index)) != index:
            raise UserError(f"{self._called(index)} has the id of task {other}, {task.id!r:.60}: give each its own")
        return task


def _makes(made: object, wanted: type | tuple[type, ...]) -> bool:
    """Whether it is a class of that kind, or a function that may return one."""
    return issubclass(made, wanted) if isinstance(made, type) else inspect.isroutine(made)


def construct(maker: Callable[..., T], args: Mapping[str, Json], where: str) -> T:
    """Call a class with arguments that its signature allows, of the types that it annotates.

    One that takes a pydantic model or a dataclass, beside `source` at most, gets its arguments as such an object.
    Raises UserError, one line that begins with the key of the recipe.
    """
    typed = _checked(maker, args, where)
    name = getattr(maker, "__name__", str(maker))
    settings = torch_settings()
    try:
        made = maker(**typed)
        check_settings(settings)
        return made
    except StateChangedError as error:
        raise UserError(f"{where}: {name}: {error}") from error
    except PlainError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {name} refuses its arguments: {describe(error, place=False)}") from error
    except BaseException as error:  # the boundary: a constructor may raise anything
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise UserError(f"{where}: {name} raised {describe(contained(error))}") from error


def _checked(
    maker: Callable[..., object], args: Mapping[str, Json], where: str, whole: bool = True
) -> dict[str, object]:
    """The arguments, as `construct` gives them. whole: none that has to be there may be absent."""
    name = getattr(maker, "__name__", str(maker))
    if (found := _config_of(maker)) is not None and found[0] not in args:
        return _with_config(*found, name, args, where, whole)
    try:
        parameters = dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):
        parameters = {}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in args:
        if key not in known and not open_ended:
            takes = nearest(key, [k for k in known if k != "source"]) or "; it takes none"
            raise UserError(f"{_key(where, key)}: {name} takes no such argument{takes}")
    for key in known:
        if whole and key not in args and parameters[key].default is inspect.Parameter.empty:
            raise UserError(f"{_key(where, key)}: {name} needs it, and it is missing")
    return {key: _typed(maker, key, value, where) for key, value in args.items()}


def with_arguments(function: Callable[..., T], position: int, args: Mapping[str, Json], where: str) -> Callable[..., T]:
    """A function whose parameter at `position` (0, 1, ...) is given `args`, as the pydantic model or dataclass
    that it is annotated with; one without such a parameter unchanged.

    Raises UserError, one line that begins with `where`, the key of the arguments.
    """
    name = getattr(function, "__name__", str(function))
    try:
        parameters = list(inspect.signature(function).parameters)[position:]
    except (TypeError, ValueError):
        parameters = []
    kind = _hints(function).get(parameters[0]) if parameters else None
    if not isinstance(kind, type) or not (issubclass(kind, BaseModel) or is_dataclass(kind)):
        if args:
            raise UserError(f"{_key(where, next(iter(args)))}: {name} takes no arguments of its own")
        return function
    return partial(function, **_with_config(parameters[0], kind, name, args, where, whole=True))


def _hints(maker: Callable[..., object]) -> dict[str, Any]:
    """The types that a class or a function annotates its arguments with; none where they cannot be read."""
    try:
        return get_type_hints(_annotated(maker))
    except (NameError, TypeError, ValueError):
        return {}


def _annotated(maker: Callable[..., object]) -> Callable[..., object]:
    """What annotates the arguments: the `__init__` of a class, be it inherited, unless that names none, as that
    of a pydantic model."""
    init = getattr(maker, "__init__", None) if isinstance(maker, type) else None
    if init is None:
        return maker
    named = [
        p for p in inspect.signature(init).parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    return init if len(named) > 1 else maker


def _config_of(maker: Callable[..., object]) -> tuple[str, type[object]] | None:
    """The name and the type of the one argument that holds all others: a pydantic model or a dataclass."""
    hints = {key: kind for key, kind in _hints(maker).items() if key not in ("source", "return")}
    if len(hints) != 1:
        return None
    (key, kind), parameters = *hints.items(), dict(inspect.signature(maker).parameters)
    if not isinstance(kind, type) or not (issubclass(kind, BaseModel) or is_dataclass(kind)):
        return None
    return (key, kind) if parameters.keys() - {"source"} == {key} else None


def _with_config(
    key: str, kind: type[Any], name: str, args: Mapping[str, Json], where: str, whole: bool
) -> dict[str, object]:
    """The arguments with all but `source` as one object of type `kind`."""
    if issubclass(kind, BaseModel):
        known, extra = list(kind.model_fields), kind.model_config.get("extra") == "allow"
    else:
        known, extra = [field.name for field in fields(kind) if field.init], False
    given = {one: value for one, value in args.items() if one != "source"}
    if not extra and (unknown := next((one for one in given if one not in known), None)) is not None:
        raise UserError(f"{_key(where, unknown)}: {name} takes no such argument{nearest(unknown, known)}")
    try:
        made: object = TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        first = next((one for one in error.errors() if whole or one["type"] not in _MISSING), None)
        if first is None:
            return dict(args)
        path = ".".join(map(str, (where, *first["loc"])))
        if first["type"] in _MISSING:
            raise UserError(f"{path}: {name} needs it, and it is missing") from None
        raise UserError(f"{path}: {_mistake(first)}") from None
    return {**{one: args[one] for one in args if one == "source"}, key: made}


_MISSING = ("missing", "missing_argument")


def _mistake(error: ErrorDetails, *names: str) -> str:
    """What pydantic found, as our errors say it. names: the keys that lead to the value."""
    text = error["msg"].partition(", unable")[0].replace("Input should", "should", 1)
    return f"{text}, got {_shown((*names, *error['loc']), error['input'])}"


def _typed(maker: Callable[..., object], key: str, value: object, where: str) -> object:
    """`value` as the annotation of argument `key` wants it, as it is where there is no annotation to check."""
    try:
        adapter: TypeAdapter[object] = TypeAdapter(_hints(maker)[key], config=ConfigDict(arbitrary_types_allowed=True))
    except (KeyError, TypeError, PydanticUserError):
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        inside = "".join(f".{part}" for part in first["loc"])
        raise UserError(f"{_key(where, key)}{inside}: {_mistake(first, key)}") from None


def _shown(names: tuple[str | int, ...], value: object) -> str:
    """What was given, for an error; `***` for what may be a secret."""
    secret = any(isinstance(name, str) and is_secret(name, value) for name in names)
    return MASK if secret else repr(masked(value, free=True))


def _key(where: str, key: str) -> str:
    if key == "source" and where.startswith("env."):
        return f"{where.removesuffix('args')}source"
    return f"{where}.{key}"


def _full(group: str) -> str:
    return group if group.startswith("agentrl.") else f"agentrl.{group}"


def _kind(group: str) -> str:
    singular = {"envs": "environment", "losses": "loss"}
    short = group.removeprefix("agentrl.")
    return singular.get(short, short.removesuffix("s"))


def _public(value: object) -> list[str]:
    return [n for n in vars(value) if not n.startswith("_")] if hasattr(value, "__dict__") else []


def _type_of(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
