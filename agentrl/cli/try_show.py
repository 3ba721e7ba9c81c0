"""Output of `agentrl try`: messages as they come, then how it ended and the parts of the reward."""

import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.common import console
from agentrl.errors import UserError
from agentrl.images import STORE, ImageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.plugins.types import Message
    from agentrl.rollout.agent import AgentRequest
    from agentrl.rollout.request import AsyncRolloutRequest
    from agentrl.trajectory import Trajectory


class Images:
    """Writes images to a folder, which is made for the first one. folder: None for a temporary one."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._count = 0

    def write(self, image: object) -> str:
        """Write an image and return a line that says where it lies, or why it cannot be shown. image: as of
        `ImageStore.put`, or the hash of one that is stored."""
        try:
            key = image if isinstance(image, str) and STORE.holds(image) else STORE.put(image)
        except ImageError as error:
            return f"(image that cannot be shown: {error})"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-try-"))
        self._count += 1
        file = self._folder / f"image-{self._count}.png"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(STORE.path(key), file)
        except OSError as error:
            raise UserError(f"an image cannot be written to {self._folder}: {error.strerror or error}") from error
        return image_line(file)


def image_line(file: Path) -> str:
    """A line about the file of an image of the store: its size, and where it lies."""
    from PIL import Image

    with Image.open(file) as image:
        width, height = image.size
    return f"(image of {width} x {height} pixels: {file})"


class Narrator:
    """Prints what is new in a request since the last time.

    silent: the roles whose messages the reader wrote. calls_only: print only calls and their results.
    """

    def __init__(self, images: Images, silent: Collection[str] = (), calls_only: bool = False) -> None:
        self._out = console()
        self._images = images
        self._silent = silent
        self._calls_only = calls_only
        self._shown = 0
        self._answers: set[int] = set()  # of an agent's calls that were shown, by their numbers
        self._uses = 0
        self._paid = 0

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line."""
        self._out.print(text, markup=False, soft_wrap=True, style=style)

    def follow(self, request: "AsyncRolloutRequest") -> None:
        """Print the messages and tool results that came since the last call."""
        from agentrl.rollout.agent import AgentRequest

        if isinstance(request, AgentRequest):
            self._calls(request)
        else:
            if len(request.main.messages) < self._shown:  # it went on from a summary
                self._shown = 0
            new = request.main.messages[self._shown :]
            self._shown += len(new)
            self._messages(new)
        self._results(request)

    def _messages(self, messages: "Sequence[Message]") -> None:
        for message in messages:
            if self._calls_only and message["role"] != "tool" and not message.get("tool_calls"):
                continue
            if message["role"] not in self._silent:
                self._message(message)

    def _calls(self, request: "AgentRequest") -> None:
        """Print what an agent sent besides what the model has answered already, and the answers."""
        for node in request.tree.nodes:
            if node.index >= self._shown:
                self._results(request)
                self._shown = node.index + 1
                known = node.parent.conversation if node.parent is not None else ()
                if node.index and node.parent is not request.tree.nodes[node.index - 1]:
                    begins = f"goes on from answer {node.parent.index + 1}" if node.parent else "begins a conversation"
                    self.say(f"(call {node.index + 1} {begins})", style="dim")
                self._messages(node.call.messages[len(known) :])
            if node.answer is not None and node.index not in self._answers:
                self._answers.add(node.index)
                self._messages([node.answer])

    def agent_ended(self, request: "AsyncRolloutRequest") -> None:
        """Print what an agent came to."""
        from agentrl.rollout.agent import AgentRequest

        if not isinstance(request, AgentRequest):
            return
        outcome = request.outcome
        if outcome.output:
            self.say("[output of the agent]", style="bold")
            self.say(outcome.output.rstrip())
        if outcome.exit_code is not None:
            self.say(f"the agent ended with exit code {outcome.exit_code}")
        if outcome.returned is not None:
            self.say(f"the agent returned {outcome.returned!r:.1000}")

    def failed(self, request: "AsyncRolloutRequest", played: "Trajectory") -> bool:
        """Print what came since the last call and what went wrong; return whether the request failed."""
        self.follow(request)
        for line in played.extra.get("release_errors", ()):
            self.say(f"release failed: {line}", style="red")
        if played.failure is not None:
            self.say(f"failed ({played.failure.boundary}): {played.failure.message}", style="red")
        return played.failure is not None

    def _message(self, message: "Message") -> None:
        name = f" {message['name']}" if message.get("name") else ""
        self.say(f"[{message['role']}{name}]", style="bold")
        if reasoning := message.get("reasoning_content"):
            self.say(reasoning, style="dim")
        content = message["content"]
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            if part.get("type") == "image":
                self.say(self._images.write(part["image"]))
            elif part.get("text") or not message.get("tool_calls"):
                self.say(str(part.get("text", part)))
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            self.say(text if isinstance(arguments, str) else f"/{call['function']['name']} {text}")

    def _results(self, request: "AsyncRolloutRequest") -> None:
        """Print time and metrics of new calls, and step rewards of new turns."""
        uses = request.tool_uses[self._uses :]
        self._uses += len(uses)
        for use in uses:
            measured = "".join(f", {key} {value:g}" for key, value in use.metrics.items())
            wrong = f", error of the {use.error.partition(':')[0]}" if use.error else ""
            self.say(f"({use.name}: {use.seconds * 1000:.1f} ms{measured}{wrong}{', cut' if use.cut else ''})", "dim")
        paid = list(request.main.step_rewards)[self._paid :]
        self._paid += len(paid)
        for reward in paid:
            if reward:
                self.say(f"(step reward {reward:g})", style="dim")


def rewards_line(trajectory: "Trajectory") -> str:
    """The reward and its parts, such as `reward 1.05: answer 1, step 0.1 x 0.5`."""
    parts = []
    for name, value in trajectory.rewards.items():
        weight = trajectory.weights.get(name, 1.0)
        parts.append(f"{name} {value:g}" + (f" x {weight:g}" if weight != 1.0 else ""))
    return f"reward {trajectory.reward:g}" + (f": {', '.join(parts)}" if parts else "")
