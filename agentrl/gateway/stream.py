"""`Writer`: the server-sent events of an answer, which is sent while it is sampled."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from agentrl.chat.base import Said
from agentrl.gateway.call import Call, Completion, GatewayError


class Writer(ABC):
    """Makes server-sent events of one answer to `call`, in a dialect."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.completion_id = ""
        self._begun = False
        self._said: list[Said] = []

    def add(self, completion_id: str, prompt_tokens: int, said: Iterable[Said]) -> Iterator[bytes]:
        """Yield the events of what has become certain, after those that begin the answer."""
        if not self._begun:
            self._begun, self.completion_id = True, completion_id
            yield from self.begin(prompt_tokens)
        for one in said:
            self._said.append(one)
            yield from self.piece(one.kind, one.text)

    def end(self, found: Completion) -> Iterator[bytes]:
        """Yield the events of what is left of the answer, and of its end. Raises GatewayError where it is another one
        than was sent."""
        message = found.message
        rest = [
            *self._rest("reasoning", message.get("reasoning_content") or ""),
            *self._rest("content", str(message["content"] or "")),
        ]
        yield from self.add(found.id, found.prompt_tokens, rest)
        yield from self.close(found)

    def _rest(self, kind: str, whole: str) -> Iterator[Said]:
        sent = "".join(one.text for one in self._said if one.kind == kind)
        if not whole.startswith(sent):
            raise GatewayError(f"the {kind} that was sent is not the beginning of the whole", 500, "server_error")
        if len(whole) > len(sent):
            yield Said(kind, whole[len(sent) :])

    @abstractmethod
    def begin(self, prompt_tokens: int) -> Iterator[bytes]:
        """Yield the events that begin an answer."""

    @abstractmethod
    def piece(self, kind: str, text: str) -> Iterator[bytes]:
        """Yield the events of a piece of `reasoning` or `content`."""

    @abstractmethod
    def close(self, found: Completion) -> Iterator[bytes]:
        """Yield the events of the calls, and of the end."""
