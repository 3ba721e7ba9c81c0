"""The tools of an MCP server: the tool source `mcp`."""

from agentrl_tools.mcp.source import McpSource

__all__ = ["McpSource"]
