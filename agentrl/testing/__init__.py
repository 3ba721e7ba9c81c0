"""Contract tests for the authors of plugins: call them in a test of your own package.

    from agentrl.testing import call, check_agent, check_environment, check_tool

    def test_contract():
        check_tool(MyTool(), calls=[({"expression": "2*3"}, "6")], wrong=[{"expression": "2*"}])

A broken promise is an AssertionError whose one line says what to do. They block, inside a running event loop as well.
"""

from agentrl.testing.agent import call, plain_text
from agentrl.testing.agent_contract import check_agent
from agentrl.testing.environment import check_environment
from agentrl.testing.tool import check_tool
from agentrl.testing.trainer import check_trainer

__all__ = ["call", "check_agent", "check_environment", "check_tool", "check_trainer", "plain_text"]
