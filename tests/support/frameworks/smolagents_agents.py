"""smolagents: a `CodeAgent`, which stops at the end of its code, and a `ToolCallingAgent`, whose calls are forced."""

import json
import os
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

with open(os.environ["AGENTRL_TASK"]) as file:
    question = json.load(file)["messages"][-1]["content"]


@tool
def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: What to compute.
    """
    return "4"


model = OpenAIServerModel(
    os.environ["AGENTRL_MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
for kind in (CodeAgent, ToolCallingAgent):
    agent = kind(tools=[calculator], model=model, max_steps=2, verbosity_level=0)
    # the embedded model reads 1,000 tokens, fewer than the instructions that these agents come with
    agent.prompt_templates["system_prompt"] = "Solve the task."
    agent.memory.system_prompt.system_prompt = agent.initialize_system_prompt()
    print(kind.__name__, agent.run(question))
Path(sys.argv[1], os.urandom(8).hex()).touch()
