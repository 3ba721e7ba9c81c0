"""Word problems with a calculator in the form of verifiers 0.4: a taskset over rows, a tool server of MCP that counts its
calls in the rollout's state, and a harness that holds the conversation in its own process."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from verifiers import v1 as vf
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from calc_sums.servers import Calculator, Uses


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, Uses]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").rpartition("####")[2].strip() == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.uses)


class SumsConfig(vf.TasksetConfig):
    rows: str = ""


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for line in Path(self.config.rows).read_text().splitlines():
            row = json.loads(line)
            yield SumTask(SumData(prompt=row["question"], answer=row["answer"]))

    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]


class LoopConfig(vf.HarnessConfig):
    turns: int = 6


class Loop(vf.Harness[LoopConfig]):
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        config = {"mcpServers": {"": {"url": url} for url in mcp_urls.values()}}
        async with AsyncExitStack() as stack:
            tools, dispatch, servers = await connect_mcp(config, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            for tool in tools:
                parameters = tool["function"]["parameters"]
                properties = {
                    n: {"type": p["type"], "description": p["description"]} for n, p in parameters["properties"].items()
                }
                tool["function"]["parameters"] = {"type": "object", "properties": properties, "required": [*properties]}
            messages = [{"role": "user", "content": data.prompt}]
            for _turn in range(self.config.turns):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, "tools": tools},
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    said = await self._called(servers, dispatch, call["function"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _called(self, servers, dispatch, function):
        try:
            return await call_mcp(servers, dispatch, function["name"], json.loads(function["arguments"]))
        except (KeyError, ValueError) as error:
            return f"error: {error}"


__all__ = ["Loop", "Sums"]
