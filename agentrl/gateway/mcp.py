"""The environment's tools as an MCP server on the gateway, for agents that take their tools so (streamable HTTP).

It is stateless: the key names the rollout, whose tools these are. Every request is answered by one JSON object.
"""

from collections.abc import Mapping

from agentrl import __version__
from agentrl.gateway.call import Endpoint, GatewayError
from agentrl.gateway.chat_completions import mapping
from agentrl.plugins.types import Json

VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol that are spoken, the newest first."""
_NO_METHOD, _WRONG = -32601, -32602


async def answer(endpoint: Endpoint, request: Mapping[str, Json]) -> dict[str, Json] | None:
    """The answer to a JSON-RPC request; None for a notification, which has none."""
    if "id" not in request:
        return None
    if not isinstance(request["id"], str | int):
        raise GatewayError("id: expected a text or a whole number")
    try:
        result = await _result(endpoint, str(request.get("method")), mapping(request.get("params"), "params"))
    except GatewayError as error:
        code = _NO_METHOD if error.status == 404 else _WRONG
        return {"jsonrpc": "2.0", "id": request["id"], "error": {"code": code, "message": error.message}}
    return {"jsonrpc": "2.0", "id": request["id"], "result": result}


def _block(part: Mapping[str, Json]) -> Mapping[str, Json]:
    """A part of a content as the protocol has it."""
    if part["type"] != "image_url":
        return part
    return {"type": "image", "mimeType": "image/png", "data": part["image_url"]["url"].partition(",")[2]}


async def _result(endpoint: Endpoint, method: str, params: Mapping[str, Json]) -> dict[str, Json]:
    match method:
        case "initialize":
            asked = params.get("protocolVersion")
            return {
                "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "agentrl", "version": __version__},
            }
        case "ping":
            return {}
        case "tools/list":
            functions = [tool["function"] for tool in endpoint.tools]
            return {
                "tools": [
                    {"name": f["name"], "description": f["description"], "inputSchema": f["parameters"]}
                    for f in functions
                ]
            }
        case "tools/call":
            name = str(params.get("name"))
            known = [tool["function"]["name"] for tool in endpoint.tools]
            if name not in known:
                raise GatewayError(f"there is no tool named {name[:64]!r}; known: {', '.join(known) or 'none'}")
            content = await endpoint.call_tool(name, mapping(params.get("arguments"), "arguments"))
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else map(_block, content)
            return {"content": list(parts), "isError": False}
        case _:
            raise GatewayError(f"the method {method[:64]!r} is not served; only tools are", 404)
