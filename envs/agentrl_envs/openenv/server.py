"""What an OpenEnv server offers, asked once when a run begins: actions, tools, and tasks where it has any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

from agentrl.errors import UserError
from agentrl.jsonable import Json
from agentrl_envs.openenv.session import LARGEST, read

SECONDS = 60.0
"""Time in which the server must answer a question about itself: it may make an environment for it."""
_CALLS = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of action schemas behind which a server takes calls of tools as steps."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server said of itself."""

    action: Mapping[str, Json]
    """JSON schema of its actions."""
    tools: Sequence[Mapping[str, Json]]
    """Its MCP tools: name, description, schema of the arguments."""
    splits: Mapping[str, int]
    """Tasks by split, where it has tasks."""

    @property
    def calls_are_steps(self) -> bool:
        """Whether a call of a tool is a step of the environment, with a reward."""
        return self.action.get("title") in _CALLS


class Server:
    """The questions. Raises UserError for whatever the answer is not."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url.rstrip("/"))
        scheme = {"http": "http", "https": "https", "ws": "http", "wss": "https"}.get(parts.scheme)
        if scheme is None or not parts.netloc:
            raise UserError(f"env.args.url: {url!r} is no address; expected one such as http://127.0.0.1:8000")
        self.url = urlunsplit(parts._replace(scheme=scheme, query="", fragment=""))
        """The base address."""
        self.socket = f"ws{self.url[4:]}/ws"
        """The address of sessions."""
        self._headers = dict(headers)

    def offer(self, tasks: str | None) -> Offer:
        """Everything. tasks: the name of the environment whose tasks are listed; None: its first one."""
        schema = self._asked("/schema")
        action = schema.get("action") if isinstance(schema, Mapping) else None
        if not isinstance(action, Mapping):
            raise UserError(f"env.args.url: {self.url}/schema has no schema of actions: is it an OpenEnv server?")
        return Offer(action, self._tools(), self._splits(tasks))

    def _tools(self) -> Sequence[Mapping[str, Json]]:
        """Its MCP tools; none where it does not speak MCP."""
        question = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = self._asked("/mcp", question, needed=False)
        result = answer.get("result") if isinstance(answer, Mapping) else None
        tools = result.get("tools") if isinstance(result, Mapping) else None
        if not isinstance(tools, list):
            return ()
        for tool in tools:
            if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
                raise UserError(f"env.args.url: {self.url} offers a tool without a name: {str(tool)[:60]!r}")
        return tools

    def _splits(self, env: str | None) -> Mapping[str, int]:
        if env is None:
            named = self._asked("/list_environments", needed=False)
            if not isinstance(named, list) or not named:
                return {}
            env = str(named[0])
        place = f"/{quote(env, safe='')}"
        splits = self._asked(f"{place}/splits", needed=False)
        if not isinstance(splits, list):
            return {}
        names = [split.get("name") if isinstance(split, Mapping) else split for split in splits]
        counts = {}
        for name in names:
            answer = self._asked(f"{place}/num_tasks", {"split": name})
            count = answer.get("num_tasks") if isinstance(answer, Mapping) else None
            if not isinstance(name, str) or not isinstance(count, int) or count < 0:
                raise UserError(f"env.args.url: {self.url} says no number of tasks of its split {name!r:.40}")
            counts[name] = count
        return counts

    def _asked(self, path: str, body: Mapping[str, Json] | None = None, *, needed: bool = True) -> Json:
        """The answer; None for an error, where it is not needed."""
        method = "GET" if body is None else "POST"
        try:
            with (
                httpx.Client(timeout=SECONDS, trust_env=False, headers=self._headers) as http,
                http.stream(method, self.url + path, json=body) as response,
            ):
                whole = b""
                for part in response.iter_bytes():
                    whole += part
                    if len(whole) > LARGEST:
                        raise UserError(f"env.args.url: {self.url}{path} answers with more than {LARGEST >> 20} MiB")
                if response.status_code >= 400:
                    if not needed:
                        return None
                    raise UserError(f"env.args.url: {self.url}{path} answered with status {response.status_code}")
                return read(whole.decode("utf-8", "replace"))
        except httpx.HTTPError as error:
            raise UserError(f"env.args.url: {self.url}{path}: {error or type(error).__name__}") from None
        except ValueError as error:
            raise UserError(f"env.args.url: {self.url}{path} sent what cannot be read: {error}") from None
