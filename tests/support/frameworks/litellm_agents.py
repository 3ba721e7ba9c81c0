"""litellm, by both of its providers: a forced call, JSON by a schema, and stop strings."""

import json
import os
import sys
from pathlib import Path
from typing import Literal

import litellm
from pydantic import BaseModel

with open(os.environ["AGENTRL_TASK"]) as file:
    task = json.load(file)


class Answer(BaseModel):
    """The answer to a problem."""

    answer: Literal[1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 24, 100]
    sure: Literal["yes", "no"]


messages = [{"role": "user", "content": task["messages"][-1]["content"]}]
name = os.environ["AGENTRL_MODEL"]
found = litellm.completion(f"openai/{name}", messages, tools=task["tools"], tool_choice="required")
assert found.choices[0].message.tool_calls
found = litellm.completion(f"openai/{name}", messages, response_format=Answer, stop=["\n\n"])
print(Answer.model_validate_json(found.choices[0].message.content).answer)
found = litellm.completion(f"anthropic/{name}", messages, tools=task["tools"], tool_choice="required", max_tokens=64)
assert found.choices[0].message.tool_calls
found = litellm.completion(f"anthropic/{name}", messages, stop=["a"], max_tokens=64)
assert "a" not in (found.choices[0].message.content or "")
Path(sys.argv[1], os.urandom(8).hex()).touch()
