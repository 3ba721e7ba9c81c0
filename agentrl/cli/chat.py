"""`agentrl chat`: talk with a model in the terminal, its tools live."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Argument, Option

from agentrl.cli.common import SUBJECT, OtherModel, Texts, console
from agentrl.plugins.types import Json

if TYPE_CHECKING:
    from agentrl.cli.try_agents import Person
    from agentrl.cli.try_env import Watched
    from agentrl.cli.try_show import Images
    from agentrl.engine.base import Engine
    from agentrl.plugins.types import Content
    from agentrl.recipe.schema import Recipe
    from agentrl.rollout.driver import Driver
    from agentrl.trajectory import Trajectory

HINT = "One line is one message; end it with \\ to continue on the next. /new begins anew; Ctrl-D quits; ? shows this."
NEW, IMAGE = "/new", "/image"
HINT_IMAGE = f"{IMAGE} FILE attaches a picture to the next message."
INTERRUPTED = 130


def chat_command(
    what: Annotated[str, Argument(metavar="RUN_OR_MODEL", help=SUBJECT)],
    overrides: Annotated[
        Texts, Argument(metavar="[KEY=VALUE]...", help="Keys to change (rollout.temperature=0).")
    ] = None,
    model: OtherModel = None,
    tools: Annotated[Texts, Option("--tools", metavar="NAME", help="A tool to offer, instead of the recipe's.")] = None,
    system: Annotated[str, Option("--system", metavar="TEXT", help="A system message to begin with.")] = "",
) -> None:
    """Talk with a model, which calls the tools of its recipe.

    agentrl chat runs/gsm8k_tool-001

    agentrl chat tiny --tools calculator
    """
    from agentrl.cli.common import recipe_and_model
    from agentrl.containment.event_loop import run
    from agentrl.recipe.sections.env import ToolSection

    recipe, path = recipe_and_model(what, overrides or [], model)
    if tools:
        recipe = recipe.changed(tools=tuple(ToolSection(name=name) for name in tools))
    try:
        run(_chat(recipe, path, system))
    except KeyboardInterrupt:
        _say("\ninterrupted: the tools were released")
        raise typer.Exit(INTERRUPTED) from None


def _say(line: str) -> None:
    console().print(line, markup=False, soft_wrap=True, style="dim")


async def _chat(recipe: "Recipe", model: str | None, system: str) -> None:
    from agentrl.cli.try_agents import Person
    from agentrl.cli.try_env import Watched
    from agentrl.cli.try_show import Images
    from agentrl.rollout.driver import takes_images
    from agentrl.rollout.player import Player
    from agentrl.rollout.talk import Talk, apart_from_tasks, unhurried

    talker = _Talker(Person(HINT, _say), recipe.rollout.max_images)
    plain = apart_from_tasks(recipe, rollout=unhurried(recipe.rollout))
    player = await Player.build(plain, model, Talk(talker.listen, system), say=_say)
    try:
        engine = Watched(player.engine)
        talker.images = takes_images(player.engine, player.chat)
        hint = f"{HINT} {HINT_IMAGE}" if talker.images else HINT
        talker.person = Person(hint, _say)
        player.engine = cast("Engine", engine)
        names = ", ".join(tool.name for tool in player.toolbox.tools) or "none"
        _say(f"model {model or recipe.model.path} · tools {names}")
        _say(hint)
        images = Images(None)
        while await talker.begins():
            await _converse(player.driver(), talker, engine, images)
        _say("")
    finally:
        for line in await player.close():
            _say(line)


class _Talker:
    """What a person says, conversation after conversation. images: whether pictures may be attached. most: how many.
    before: called each time one is listened to in mid-talk."""

    def __init__(self, person: "Person", most: int) -> None:
        self.person, self.most, self.images = person, most, False
        self._first: Content | None = None
        self._attached: list[dict[str, Json]] = []
        self.gone = False
        self.before: Callable[[], None] = lambda: None

    async def begins(self) -> bool:
        """Hear the first words of a conversation; False where there is none."""
        while not self.gone:
            if (said := await self._heard()) is not None:
                self._first = said
                return True
        return False

    async def listen(self) -> "Content | None":
        """The next words; None at the end of the conversation."""
        if self._first:
            said, self._first = self._first, None
            return said
        self.before()
        return await self._heard()

    async def _heard(self) -> "Content | None":
        text: str | None = ""
        while text is not None and not text.strip():
            text = await self.person.turn(0)
            if text is not None and text.split(maxsplit=1)[:1] == [IMAGE]:
                self._attach(text.strip().removeprefix(IMAGE).strip())
                text = ""
        self.gone = text is None
        attached, self._attached = self._attached, []
        if text is None or text.strip() == NEW:
            return None
        return [*attached, {"type": "text", "text": text}] if attached else text

    def _attach(self, path: str) -> None:
        """Keep a picture for the next message, or say why it cannot be shown."""
        from agentrl.images import STORE, ImageError, data_url

        if not self.images:
            _say(f"({IMAGE}: this model does not see: it reads text)")
            return
        if len(self._attached) >= self.most:
            _say(f"({IMAGE}: a conversation holds {self.most} images (rollout.max_images))")
            return
        if not path:
            _say(f"({IMAGE}: name a file)")
            return
        file = Path(path.strip("'\"")).expanduser()
        try:
            key = STORE.put(file)
        except ImageError as error:
            _say(f"({IMAGE}: {error})")
            return
        self._attached.append({"type": "image", "image": data_url(key)})
        width, height = STORE.load(key).size
        _say(f"attached to the next message: {file}, {width} x {height} pixels")


async def _converse(driver: "Driver", talker: _Talker, engine: "Watched", images: "Images") -> None:
    """Hold one conversation, and say why it is over where the person did not end it."""
    from agentrl.cli.try_show import Narrator
    from agentrl.plugins.types import Task

    narrator = Narrator(images, silent=("system", "user"))
    request = driver.request(Task("talk", {}), 0, seed=secrets.randbits(62))
    engine.before = talker.before = lambda: narrator.follow(request)
    played = await driver.drive(request)
    narrator.failed(request, played)
    if not talker.gone:
        _say(f"({_why(played, driver.limits.max_turn_tokens)}a new conversation begins)")


def _why(played: "Trajectory", longest: int) -> str:
    from agentrl.trajectory import FinishReason

    if played.finish in (FinishReason.STOP, FinishReason.ERROR):
        return ""
    if played.finish is not FinishReason.LENGTH:
        return f"it ended by {played.finish}: "
    last = played.turns[-1]
    if last.end - last.start >= longest:
        return f"the answer was cut at {longest} tokens, rollout.max_turn_tokens: "
    return "the model's context is full: "
