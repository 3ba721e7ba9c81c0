"""An agent of your own: your loop, your prompts; its answers are trained. It reaches the model through the gateway.

    python own_agent.py [STEPS]

The agent asks, lets the model call tools, and where the answer holds no number asks once more. What the model sampled
in these calls is trained on as it was sampled; what the agent says is context.
"""

import sys
from typing import Any

import agentrl
from agentrl import AgentClient, Recipe, Task


async def solve(task: Task, client: AgentClient, rounds: int = 6) -> str:
    """Do one task. client: the opening messages, the tools, and clients of the gateway for the vendors' SDKs."""
    messages: list[Any] = list(client.messages)
    asked = False
    async with client.openai() as openai:
        for _ in range(rounds):
            found = await openai.chat.completions.create(
                model=client.model, messages=messages, tools=list(client.tools)
            )
            message = found.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                text = await client.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            if message.tool_calls:
                continue
            if asked or any(letter.isdigit() for letter in message.content or ""):
                return message.content or ""
            asked = True
            messages.append({"role": "user", "content": "Please end with a number."})
    return ""


RECIPE = {
    "model": {"path": "tiny"},
    "env": {"name": "gsm8k"},
    "tools": [{"name": "calculator"}],
    "agent": {"name": "own_agent:solve"},
    "rollout": {"tasks": 4, "n": 4, "max_turn_tokens": 64, "max_tool_tokens": 32, "max_tokens": 512},
    "train": {"lr": 2e-4, "save_every": 0},
    "eval": {"tasks": 8, "every": 0, "splits": ["test"]},
}


def main(steps: int = 20) -> None:
    recipe = Recipe.model_validate(RECIPE).changed(train={"steps": steps})
    result = agentrl.train(recipe, name="own_agent")
    print(f"held-out accuracy: {result.before['test']:.0%} -> {result.after['test']:.0%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
