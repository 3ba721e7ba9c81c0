"""Agents on the vendors' own SDKs: a loop that lets the model call the task's tools until it answers without one.

They are short so that you can copy one and make it yours: what trains a model is only that the client's base URL and
key are the gateway's.
"""

from agentrl.plugins.agent import AgentClient
from agentrl.plugins.types import Json, Task


async def chat_completions(task: Task, client: AgentClient, turns: int = 6) -> str:
    """Solve a task over the Chat Completions API. turns: answers of the model at most. Returns the last answer."""
    messages: list[Json] = list(client.messages)
    async with client.openai() as openai:
        for _ in range(turns):
            found = await openai.chat.completions.create(
                model=client.model, messages=messages, tools=list(client.tools) or None
            )
            message = found.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                content = await client.call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return message.content or ""


async def responses(task: Task, client: AgentClient, turns: int = 6) -> str:
    """Solve a task over the Responses API, the conversation kept by the gateway. Returns the last answer."""
    say: list[Json] = [{**message, "content": _inputs(message["content"])} for message in client.messages]
    tools = [{"type": "function", **tool["function"]} for tool in client.tools]
    before: str | None = None
    async with client.openai() as openai:
        for _ in range(turns):
            found = await openai.responses.create(
                model=client.model, input=say, tools=tools, previous_response_id=before
            )
            before, say = found.id, []
            for item in found.output:
                if item.type == "function_call":
                    output = _inputs(await client.call_tool(item.name, item.arguments))
                    say.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
            if not say:
                break
    return str(found.output_text)


async def anthropic_messages(task: Task, client: AgentClient, turns: int = 6) -> str:
    """Solve a task over the Messages API by the `anthropic` SDK. Returns the last answer."""
    system = "\n".join(str(m["content"]) for m in client.messages if m["role"] == "system")
    messages: list[Json] = [{**m, "content": _blocks(m["content"])} for m in client.messages if m["role"] != "system"]
    functions = [tool["function"] for tool in client.tools]
    tools = [{**{k: f[k] for k in ("name", "description")}, "input_schema": f["parameters"]} for f in functions]
    options: dict[str, Json] = {"system": system} if system else {}
    async with client.anthropic() as anthropic:
        for _ in range(turns):
            found = await anthropic.messages.create(
                model=client.model, max_tokens=1024, messages=messages, tools=tools, **options
            )
            messages.append({"role": "assistant", "content": [block.model_dump() for block in found.content]})
            calls = [block for block in found.content if block.type == "tool_use"]
            if not calls:
                break
            results = []
            for call in calls:
                content = _blocks(await client.call_tool(call.name, call.input))
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": content})
            messages.append({"role": "user", "content": results})
    return "".join(block.text for block in found.content if block.type == "text")


def _inputs(content: object) -> Json:
    """A content of the Chat Completions API, text or texts and images, as the Responses API has it."""
    return [_input(part) for part in content] if isinstance(content, list) else content


def _input(part: Json) -> Json:
    if part["type"] == "image_url":
        return {"type": "input_image", "image_url": part["image_url"]["url"]}
    return {"type": "input_text", "text": part["text"]}


def _blocks(content: object) -> Json:
    """A content of the Chat Completions API as the Messages API has it."""
    return [_block(part) for part in content] if isinstance(content, list) else content


def _block(part: Json) -> Json:
    if part["type"] != "image_url":
        return part
    kind, _, data = part["image_url"]["url"].removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
