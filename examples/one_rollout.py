"""One rollout, token by token: render, generate, parse, call, bridge, loss mask. The driver's loop without its cares.

    python examples/one_rollout.py [RECIPE] [KEY=VALUE ...]

Each token is printed on the line of its part: what the model read (mask 0) and what it sampled (mask 1), which alone is
trained on. The sampled ids are never tokenized again: `bridge` gives the ids between a turn and the next one.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from random import Random
from time import monotonic

from agentrl import Session, Tool
from agentrl.engine.base import Sampling
from agentrl.plugins.registry import tasks_of
from agentrl.plugins.toolbox import offered
from agentrl.recipe.load import load_recipe
from agentrl.recipe.schema import Recipe
from agentrl.rollout.player import Player

IDS: list[int] = []  # the whole conversation, as the model sees it
MASK: list[int] = []  # 1 on exactly the sampled tokens: the loss mask


def extend(player: Player, part: str, ids: Sequence[int], sampled: int) -> None:
    """Add tokens of a part to the conversation, and print them one by one."""
    IDS.extend(ids)
    MASK.extend([sampled] * len(ids))
    pieces = " ".join(json.dumps(player.chat.decode([token]), ensure_ascii=False) for token in ids)
    print(f"{part:<9} mask {sampled}  {len(ids):>3} tokens  {pieces}\n")


async def call(tool: Tool | None, name: str, arguments: dict, session: Session) -> str:
    """What a tool answers; what is wrong with a call is told to the model."""
    if tool is None:
        return f"Error: there is no tool named {name!r}"
    try:
        answer = await tool.execute(session, **tool.check(arguments))
    except Exception as error:  # noqa: BLE001 - a tool that raises tells the model
        return f"Error: {error}"
    return answer if isinstance(answer, str) else answer.text


async def roll_out(player: Player, recipe: Recipe) -> None:
    chat, engine, env, limits = player.chat, player.engine, player.env, recipe.rollout
    task = tasks_of(env, "train")[0]
    tools = offered(task, player.toolbox.tools, env)
    session = Session("example", task, Random(0), monotonic() + limits.timeout)
    sessions = {name: Session("example", task, Random(0), session.deadline, environment=session) for name in tools}
    messages = list(await env.create(session, **task.create_kwargs))
    session.messages = messages  # hooks may read what was said
    for name, tool in tools.items():
        await tool.create(sessions[name])
    # Render: the opening messages and the schemas of the tools become ids, up to where the model begins to write.
    extend(player, "render", chat.render(messages, [tool.schema for tool in tools.values()]), 0)
    for turn in range(limits.max_turns):
        # Generate: the engine goes on from the ids, until an id that ends a turn.
        sampling = Sampling(limits.max_turn_tokens, limits.temperature, stop_ids=chat.stop_ids, seed=turn)
        generation = await engine.generate(IDS, sampling, "example")
        extend(player, "generate", generation.ids, 1)
        # Parse: text and calls out of the sampled ids.
        parsed = chat.parse(generation.ids)
        messages.append({"role": "assistant", "content": parsed.content})
        if not parsed.calls:
            break
        # Call: each call of the turn; what comes back is a message.
        replies = []
        for one in parsed.calls[: limits.max_tool_calls_per_turn]:
            text = one.error or await call(
                tools.get(one.name), one.name, one.arguments, sessions.get(one.name, session)
            )
            print(f"call      {one.name}({one.arguments}) -> {text}\n")
            replies.append({"role": "tool", "tool_call_id": "0", "name": one.name, "content": text})
        messages += replies
        # Bridge: the ids between the sampled turn and the next token, with the replies in them.
        extend(player, "bridge", chat.bridge(generation.ids, replies), 0)
    engine.finish("example")
    rewards = await env.calc_reward(session)
    await env.release(session)
    print(f"reward    {rewards}: {sum(MASK)} of {len(IDS)} tokens would be trained, the sampled ones")


async def main(arguments: Sequence[str]) -> None:
    path = next((argument for argument in arguments if "=" not in argument), "gsm8k_tool")
    recipe = load_recipe(path, [argument for argument in arguments if "=" in argument])
    player = await Player.build(recipe)  # environment, tools, model, tokenizer, chat, engine
    try:
        await roll_out(player, recipe)
    finally:
        await player.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
