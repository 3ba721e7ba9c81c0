"""`agentrl try TOOL`: run its calls as one request of the driver, one call per turn, through every hook."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.cli.try_show import Images, Narrator, rewards_line
from agentrl.errors import UserError, nearest
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.plugins.tool import Tool
    from agentrl.recipe.sections.env import ToolSection

FAILED = 1


def try_tool(
    name: str,
    args: Mapping[str, Json],
    calls: Sequence[str],
    *,
    create: Mapping[str, Json],
    tool: str | None,
    images: str | None,
    seed: int,
) -> int:
    """The exit code: 1 if a call was answered by an error."""
    from agentrl.containment.event_loop import run
    from agentrl.recipe.sections.env import ToolSection

    arguments = [_arguments(text, i) for i, text in enumerate(calls, 1)]
    section = ToolSection(name=name, args=dict(args))
    return run(_try(section, tool, arguments, create, Narrator(Images(images), calls_only=True), seed))


def _arguments(text: str, number: int) -> dict[str, Json]:
    where = f"call {number}: {text[:60]!r}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f'{where} is not JSON: {error}; write it as in \'{{"expression": "2*3"}}\'') from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object with the arguments by name")
    return value


async def _try(
    section: "ToolSection",
    chosen: str | None,
    calls: Sequence[Mapping[str, Json]],
    create: Mapping[str, Json],
    narrator: Narrator,
    seed: int,
) -> int:
    from agentrl.plugins.toolbox import Toolbox
    from agentrl.testing.play import Alone

    toolbox = await Toolbox.open([section], Alone())
    try:
        tool = _choose(toolbox.tools, section.name, chosen, narrator, bool(calls))
        if tool is None:
            return 0
        if not calls:
            _describe(tool, section.name, narrator, chosen)
            return 0
        return await _play(tool, calls, create, narrator, seed)
    finally:
        await toolbox.close()


def _choose(tools: "Sequence[Tool]", name: str, chosen: str | None, narrator: Narrator, called: bool) -> "Tool | None":
    """The tool to call; None if the tools of its source were listed instead."""
    from agentrl.plugins.schema import outline

    names = [tool.name for tool in tools]
    if chosen is not None:
        if chosen not in names:
            raise UserError(f"--tool {chosen}: {name} does not offer it{nearest(chosen, names)}")
        return tools[names.index(chosen)]
    if len(tools) == 1:
        return tools[0]
    if called:
        raise UserError(f"{name} offers {len(tools)} tools: choose one by --tool: {', '.join(names) or 'none'}")
    for tool in tools:
        narrator.say(f"{tool.name} {outline(tool.parameters)}")
        narrator.say(f"  {tool.description}")
    return None


def _describe(tool: "Tool", name: str, narrator: Narrator, chosen: str | None) -> None:
    from agentrl.plugins.schema import outline

    narrator.say(f"{tool.name} {outline(tool.parameters)}")
    narrator.say(tool.description)
    narrator.say(json.dumps(dict(tool.parameters), ensure_ascii=False, indent=2))
    keys = tool.parameters.get("required") or list(tool.parameters.get("properties", {}))
    example = json.dumps(dict.fromkeys(keys, "..."))
    option = f" --tool {chosen}" if chosen else ""
    narrator.say(f"call it with: agentrl try {name}{option} '{example}'", style="dim")


async def _play(
    tool: "Tool", calls: Sequence[Mapping[str, Json]], create: Mapping[str, Json], narrator: Narrator, seed: int
) -> int:
    from agentrl.plugins.types import Task, ToolKwargs
    from agentrl.testing.agent import call
    from agentrl.testing.play import Alone, Stage

    lines = [call(tool.name, **arguments) for arguments in calls]
    changes = {"max_turns": len(lines) + 1, "max_tool_calls": len(lines), "timeout": 3600.0 * len(lines)}
    stage = Stage(Alone(), [tool], changes=changes)
    task = Task("try", {}, tools_kwargs={tool.name: ToolKwargs(create_kwargs=dict(create))})

    async def turn(number: int) -> str:
        narrator.follow(request)
        return lines[number] if number < len(lines) else ""

    request = stage.request(task, turn, seed=seed)
    played = await stage.driver.drive(request)
    if narrator.failed(request, played):
        return FAILED
    narrator.say(rewards_line(played) if played.rewards else "reward: the tool gives none", style="bold")
    if left := len(calls) - len(played.tool_uses):
        narrator.say(f"it ended the episode: {left} {'call was' if left == 1 else 'calls were'} not made")
    return FAILED if any(use.error for use in played.tool_uses) or played.extra.get("release_errors") else 0
