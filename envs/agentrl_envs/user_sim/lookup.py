"""The environment's own tool: what the shop's book says of a number. It reads the request's `Dialogue`."""

from typing import Any

from agentrl.plugins.tool import Tool
from agentrl.plugins.types import Session, ToolResponse
from agentrl_envs.user_sim.dialogue import Dialogue
from agentrl_envs.user_sim.generate import Scenario


class Lookup(Tool):
    """Finds the record of a number that the customer gave."""

    name = "lookup"
    description = "Looks an order or card number up in the shop's book."

    def __init__(self) -> None:
        number = {"type": "string", "description": "such as 1234"}
        self.parameters = {"type": "object", "properties": {"number": number}, "required": ["number"]}

    async def execute(self, session: Session, **arguments: Any) -> ToolResponse:
        assert session.environment is not None, "the tool belongs to the environment user_sim"
        dialogue: Dialogue = session.environment.state
        text = record(dialogue.scenario, arguments["number"])
        return ToolResponse(text or f"error: no record of {arguments['number'][:20]}", error=text is None)


def record(scenario: Scenario, number: str) -> str | None:
    """What is found; None for any number but the customer's."""
    if scenario.found is None or number.strip(" #") not in scenario.facts.values():
        return None
    return f"{scenario.kind.name} {scenario.found}"
