"""pydantic-ai: an answer of a type by a forced call (its default), by the API's own format, and by the prompt."""

import json
import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, AgentRunError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel

with open(os.environ["AGENTRL_TASK"]) as file:
    question = json.load(file)["messages"][-1]["content"]


class Answer(BaseModel):
    """The answer to a problem."""

    answer: Literal[1, 2, 3, 4, 5, 6, 8, 10, 12, 20, 24, 100]
    sure: Literal["yes", "no"]


model = OpenAIChatModel(os.environ["AGENTRL_MODEL"])  # address and key from the environment
for output in (ToolOutput, NativeOutput, PromptedOutput):
    agent = Agent(model, output_type=output(Answer), retries=2)
    try:
        print(output.__name__, agent.run_sync(question).output.answer)
    except AgentRunError:
        if output is not PromptedOutput:  # by the prompt alone the embedded model writes other objects
            raise
Path(sys.argv[1], os.urandom(8).hex()).touch()
