"""A harness in the form of verifiers 0.4 whose program runs in the task's container: it gives the model a shell.

The program needs Python alone: verifiers' own `bash` harness installs packages in the container, which takes an index.
"""

import json

from verifiers import v1 as vf

PROGRAM = """
import json, subprocess, sys, urllib.request

endpoint, secret, model, prompt, turns = sys.argv[1:]
shell = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": shell}}]
messages = [{"role": "user", "content": prompt}]
for _ in range(int(turns)):
    body = json.dumps({"model": model, "messages": messages, "tools": tools}).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/chat/completions", body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or []:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr})
    if not message.get("tool_calls"):
        break
"""


class ShellConfig(vf.HarnessConfig):
    turns: int = 4


class Shell(vf.Harness[ShellConfig]):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        _, prompt = self.resolve_text_prompt(data)
        await runtime.write("/tmp/agent.py", PROGRAM.encode())
        words = [endpoint, secret, ctx.model, prompt or "", json.dumps(self.config.turns)]
        return await runtime.run(["python3", "/tmp/agent.py", *words], {})


__all__ = ["Shell"]
