"""`agent`: who holds the conversation in place of the built-in driver."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from agentrl.jsonable import Json
from agentrl.recipe.sections.section import Count, Positive, Section, Unit, words


def host_and_port(address: str) -> tuple[str, int]:
    """The host of ADDRESS or ADDRESS:PORT, and the port; 0 without one. Raises ValueError."""
    bare = address.count(":") > 1 and not address.startswith("[")  # of IPv6
    try:
        parts = urlsplit(f"//[{address}]" if bare else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.netloc.strip("[]") != address.strip("[]") or "@" in address:
        raise ValueError(f"expected an address such as 0.0.0.0, or 0.0.0.0:8000, got {address[:80]!r}")
    return host, port or 0


def _listening(address: str) -> str:
    host_and_port(address)
    return address


def _sandboxed(value: Json) -> Json:
    return (() if value else None) if isinstance(value, bool) else words(value)


def _public(url: str) -> str:
    try:
        parts = urlsplit(url.replace("{port}", "1"))
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) and not parts.query
    except ValueError:
        known = False
    if not known:
        raise ValueError(f"expected a URL such as http://10.0.0.5:{{port}}, got {url[:80]!r}")
    return url.rstrip("/")


class AgentSection(Section):
    """Who holds the conversation with the model, through the gateway, in place of the built-in driver;
    `agent: my_package.agents:solve` is short for `{name: my_package.agents:solve}`."""

    name: str | None = None
    """An installed agent, or module:attribute: a function `solve(task, client)`."""
    args: dict[str, Json] = Field(default_factory=dict)
    """Further arguments of the function or class."""
    command: Annotated[tuple[str, ...], BeforeValidator(words)] = ()
    """A program instead of `name`, and its arguments, in which {prompt} is the opening's text. It finds the gateway by
    OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY, and its task in $AGENTRL_TASK."""
    sandbox: Annotated[tuple[str, ...] | None, BeforeValidator(_sandboxed)] = None
    """true: run the program in bubblewrap, as an ordinary user: without a network but the gateway, with no files but
    the system's, read-only, and its working folder, and within limits of memory, processes and temporary files. A list:
    so, with further folders that it may read, such as the one that it is installed in. null or false: not."""
    host: Annotated[str, AfterValidator(_listening)] = "127.0.0.1"
    """Address on which the gateway listens, or ADDRESS:PORT: 0.0.0.0 where containers or other machines reach it, which
    takes the rollout's key, as ever. Without a port any free one."""
    public_url: Annotated[str, AfterValidator(_public)] | None = None
    """Where agents find the gateway, such as http://10.0.0.5:{port}; {port} is the one on which it listens.
    null: at the address on which it listens; of 0.0.0.0, at this machine's own."""
    processes: Annotated[Count, Unit("processes")] = 0
    """Run the function or class in this many processes, many rollouts in each, so that it does not hold up sampling;
    one that dies fails its rollouts and is replaced. 0: in the run's own."""
    max_calls: Annotated[Positive, Unit("calls")] = 32
    """Calls of the model that one rollout may make."""
    train: Literal["all", "tools"] = "all"
    """Which answers are trained, of those that somebody received: all, or those of calls that offer tools alone. A call
    may say so itself, by the header `X-Agentrl-Train: 0` or `1`."""
    history: Literal["sampled", "template"] = "sampled"
    """What becomes of thinking that the chat template leaves out of earlier turns: `sampled` keeps it, so that a
    conversation stays one path; `template` goes on without it, from a branch that begins anew."""
