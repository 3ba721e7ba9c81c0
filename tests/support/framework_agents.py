"""Agents on the frameworks that the tests install: each asks for what common frameworks ask for."""

from typing import Any, Literal

from pydantic import BaseModel

from agentrl.plugins.agent import AgentClient
from agentrl.plugins.types import Task


class Answer(BaseModel):
    """The answer to a problem, one of few (SDKs leave out limits of numbers), and how sure it is."""

    answer: Literal[1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 24, 100]
    sure: Literal["yes", "no"]


def question(client: AgentClient) -> str:
    return str(client.messages[-1]["content"])


async def openai(task: Task, client: AgentClient) -> int:
    """The `openai` package: a forced call, JSON by a schema in both of its APIs, and a stop string."""
    messages: list[Any] = [{"role": "user", "content": question(client)}]
    async with client.openai() as sdk:
        chat = sdk.chat.completions
        asked: Any = {"model": client.model, "messages": messages}
        called = await chat.create(**asked, tools=list(client.tools), tool_choice="required")
        (call,) = called.choices[0].message.tool_calls or ()
        named: Any = {"type": "function", "function": {"name": "calculator"}}
        await chat.create(**asked, tools=list(client.tools), tool_choice=named, stream=False)
        result = await client.call_tool(call.function.name, call.function.arguments)  # type: ignore[union-attr]
        messages += [called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        parsed = (await chat.parse(**asked, response_format=Answer)).choices[0].message.parsed
        loose = await chat.create(**asked, response_format={"type": "json_object"}, stop="}")
        assert "}" not in (loose.choices[0].message.content or "")
        made = await sdk.responses.parse(model=client.model, input=question(client), text_format=Answer)
    assert parsed is not None
    assert made.output_parsed is not None
    return parsed.answer


async def anthropic(task: Task, client: AgentClient) -> int:
    """The `anthropic` package: any tool, one tool, an output format, and stop sequences."""
    tools: list[Any] = [
        {"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in client.tools
    ]
    asked: Any = {
        "model": client.model,
        "max_tokens": 48,
        "messages": [{"role": "user", "content": question(client)}],
    }
    async with client.anthropic() as sdk:
        found = await sdk.messages.create(**asked, tools=tools, tool_choice={"type": "any"})
        assert [block.type for block in found.content] == ["tool_use"]
        async with sdk.messages.stream(**asked, tools=tools, tool_choice={"type": "tool", "name": "calculator"}) as one:
            assert (await one.get_final_message()).stop_reason == "tool_use"
        cut = await sdk.messages.create(**asked, stop_sequences=["a", "e", "1", "2"])
        assert cut.stop_reason in ("stop_sequence", "end_turn", "max_tokens", "tool_use")
        assert cut.stop_sequence is None or cut.stop_reason == "stop_sequence"
        parsed = (await sdk.messages.parse(**asked, output_format=Answer)).parsed_output
    assert parsed is not None
    return parsed.answer


async def agents_sdk(task: Task, client: AgentClient) -> int:
    """The OpenAI Agents SDK: a tool that must be used, then an answer of a type."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool

    @function_tool
    async def calculator(expression: str) -> str:
        """Compute."""
        return str(await client.call_tool("calculator", {"expression": expression}))

    async with client.openai() as sdk:
        model, quiet = OpenAIResponsesModel(client.model, sdk), RunConfig(tracing_disabled=True)
        solver = Agent(
            name="solver", model=model, tools=[calculator], tool_use_behavior="stop_on_first_tool",
            model_settings=ModelSettings(tool_choice="required"),
        )  # fmt: skip
        found = await Runner.run(solver, question(client), run_config=quiet)
        judge = Agent(name="judge", model=model, output_type=Answer)
        said: Any = [*found.to_input_list(), {"role": "user", "content": "So?"}]
        ended = await Runner.run(judge, said, run_config=quiet)
    return int(ended.final_output.answer)
