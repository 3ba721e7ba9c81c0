"""`Player`: the parts that play tasks, put together from a recipe: environment, tools, model, chat, engine, driver."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.chat.base import Chat, Seeing
from agentrl.chat.load import load_chat
from agentrl.cluster.placement import Placement, place
from agentrl.containment.deadline import leave_behind
from agentrl.containment.threads import in_thread
from agentrl.data.prompts import PromptLengths, drawn, fits, measure_prompts, showable, unseen
from agentrl.data.sampler import TaskSampler
from agentrl.engine.base import Engine, engine_class, launched_by
from agentrl.errors import UserError
from agentrl.models.download import download
from agentrl.models.image_input import check_sight, limit_images
from agentrl.models.load import check_roles, load_model, load_skeleton, on_gpu, resolve
from agentrl.models.shape import short_context
from agentrl.plugins.agent import Agent
from agentrl.plugins.agent_process import agent_of_recipe
from agentrl.plugins.environment import Environment
from agentrl.plugins.registry import make_engine, make_environment, make_message_engine
from agentrl.plugins.rewards import MODEL, Rewards, check_weights, known_parts, make_rewards
from agentrl.plugins.tool import Tool
from agentrl.plugins.toolbox import Toolbox, close_all
from agentrl.plugins.types import Json, Task
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.agent import AgentSection, host_and_port
from agentrl.recipe.sections.cluster import ClusterSection
from agentrl.rollout.conversation import Seed
from agentrl.rollout.driver import Driver
from agentrl.rollout.groups import After, roll_out
from agentrl.rollout.scorer import Scorer
from agentrl.rollout.talk import ENDLESS
from agentrl.rollout.workspaces import Workspaces, workspaces_of
from agentrl.trajectory import STEP, Group, Trajectory

if TYPE_CHECKING:
    from agentrl.gateway.server import Gateway

CLOSE_SECONDS = 60.0
"""What the plugins of one kind may take to close, at the end of a run."""
MANY = 64
"""Samples of a step from which on several processes may sample them."""


@dataclass(slots=True)
class Player:
    """Serves a whole run: training steps and evaluations play through one engine on one set of weights."""

    recipe: Recipe
    """The recipe of the run."""
    env: Environment
    """The environment, or the mixture of several."""
    toolbox: Toolbox
    """The recipe's tools, opened."""
    rewards: Rewards
    """The recipe's reward functions."""
    model: Any
    """A transformers causal LM, which the trainer updates in place; None behind an endpoint."""
    tokenizer: Any
    """A transformers tokenizer; None behind an endpoint that takes messages."""
    chat: Chat
    """Converts messages to ids and back."""
    engine: Engine
    agent: Agent | None = None
    """Holds the conversations in place of the built-in driver; None: nobody."""
    gateway: "Gateway | None" = None
    """Where the agent reaches the model."""
    workspaces: Workspaces | None = None
    """The files and processes of rollouts; None: the recipe has no section `workspace`."""

    @classmethod
    async def build(
        cls,
        recipe: Recipe,
        model_path: str | None = None,
        env: Environment | None = None,
        say: Callable[[str], None] | None = None,
        phase: Callable[[str], None] | None = None,
        trained_elsewhere: bool = False,
        placement: Placement | None = None,
    ) -> "Player":
        """Build a player from what the recipe names; `model_path` replaces `model.path`, adapter and all. Raises
        UserError: one line.

        env: made already by whoever had something to ask of it before a model is loaded. say, phase: told what an
        engine has to say as it starts, in lines that stay, and what it does right now. trained_elsewhere: the model is
        trained in other processes, which give the engine its weights: here it has no adapter, and weights only where
        the engine computes with them. placement: the devices of the engine, and of a model that it computes with here;
        None: of a run in this process, without `cluster`. Sets torch's seed and, where the recipe says so, its threads.
        """
        prepare_torch(recipe)
        limit_images(recipe)
        env = env or make_environment(recipe.env)
        rewards = make_rewards(recipe.rewards)
        agent = agent_of_recipe(recipe.agent, recipe.workspace is not None) if recipe.agent is not None else None
        async with AsyncExitStack() as stack:  # what was opened is closed where a later part cannot be had
            toolbox = await Toolbox.open(recipe.tools, env)
            stack.push_async_callback(toolbox.close)
            workspaces = await workspaces_of(recipe.workspace, env, toolbox.tools, recipe.agent)
            if workspaces is not None:
                stack.push_async_callback(workspaces.close)
            if agent is not None:
                check_tools_of_agent((*toolbox.tools, *env.tools()))
            others = (STEP, *rewards.samples, *rewards.groups, *((MODEL,) if recipe.rewards.model else ()))
            check_weights(recipe.rewards.weights, known_parts((env, *toolbox.tools, *env.tools()), others))
            player = await cls._build(
                recipe, model_path, env, toolbox, rewards, say, phase, trained_elsewhere, placement
            )
            player.workspaces = workspaces
            if agent is not None:
                stack.push_async_callback(player.engine.close)
                player.agent, player.gateway = agent, gateway_of(recipe)
                await player.gateway.start()
            stack.pop_all()
        return player

    @classmethod
    async def _build(
        cls,
        recipe: Recipe,
        model_path: str | None,
        env: Environment,
        toolbox: Toolbox,
        rewards: Rewards,
        say: Callable[[str], None] | None,
        phase: Callable[[str], None] | None,
        trained_elsewhere: bool,
        placement: Placement | None,
    ) -> "Player":
        if engine_class(recipe.engine.name).brings_chat:
            engine = make_message_engine(recipe.engine)
            await engine.health()
            return cls(recipe, env, toolbox, rewards, None, None, engine.chat, engine)
        placement, section = placement or placed_alone(recipe), recipe.model
        if model_path is not None:
            section = section.model_copy(update={"path": model_path, "lora": None})
        if trained_elsewhere:
            section = section.model_copy(update={"lora": None})
        if placement is not None and placement.embedded is not None:
            section = section.model_copy(update={"device": f"cuda:{placement.embedded}"})
        shape_only = trained_elsewhere and not engine_class(recipe.engine.name).in_process
        await in_thread(download, resolve(section.path), phase or (lambda line: None))
        if shape_only:
            model, tokenizer = load_skeleton(section)
        else:
            light = recipe.engine.name == "local" and not recipe.cluster.used
            model, tokenizer = load_model(section, recipe.train.seed, light=light)
        if tokenizer.image_input is not None:
            check_sight(recipe)
            check_roles(recipe, tokenizer.image_input)
        chat = load_chat(
            tokenizer,
            model_path=section.path,
            kind=section.chat,
            chat_template=section.chat_template,
            tools=[tool.schema for tool in (*toolbox.tools, *env.tools())],
        )
        place = resolve(section.path)
        engine = make_engine(
            recipe.engine,
            model,
            model_path=place,
            tokenizer=tokenizer,
            say=say,
            phase=phase,
            lora=recipe.model.lora,
            cluster=recipe.cluster.address,
            devices=placement.servers if placement is not None else (),
            dtype="bfloat16" if section.compute == "bfloat16" else section.dtype,
            overlap=recipe.rollout.overlap != "none" and not trained_elsewhere,
            routing_replay=recipe.algorithm.routing_replay,
            shared=recipe.engine.sleep,
            workers=recipe.cluster.size if on_gpu(recipe) else 0,
            processes="auto" if recipe.rollout.tasks * recipe.rollout.n >= MANY and not recipe.cluster.used else 1,
        )
        await engine.health()
        line = short_context(recipe, engine.max_context)
        if say is not None and line and recipe.rollout.max_tokens < ENDLESS:
            say(line)
        return cls(recipe, env, toolbox, rewards, model, tokenizer, chat, engine)

    @property
    def prompt_limit(self) -> int:
        """The most tokens of an opening prompt that leave room for an answer."""
        return min(self.recipe.rollout.max_tokens, self.engine.max_context) - 1

    async def measure(self, tasks: Sequence[Task], max_tokens: int | None = None) -> PromptLengths:
        """The lengths of the tasks' opening prompts, and the most that fit. max_tokens: in place of
        `rollout.max_tokens`."""
        most = self.prompt_limit if max_tokens is None else min(max_tokens, self.engine.max_context) - 1
        images = self.recipe.rollout.max_images
        return await measure_prompts(self.env, self.toolbox.tools, self.chat, tasks, most, images)

    async def unseen(self, task: Task) -> str | None:
        """Why an image of a task's opening cannot be shown; None: all of them can."""
        return await unseen(self.env, self.chat, task)

    async def draw(self, sampler: TaskSampler, tasks: Sequence[Task], count: int) -> list[int]:
        """The indices of the next `count` tasks that are `playable`. Raises UserError: no task is left."""
        return await drawn(sampler, count, lambda index: self.playable(sampler, tasks, index))

    @property
    def sees(self) -> bool:
        """Whether images are shown."""
        return isinstance(self.chat, Seeing)

    async def playable(self, sampler: TaskSampler, tasks: Sequence[Task], index: int) -> bool:
        """Whether the images of a task that was drawn can be shown, and the prompt of one that an `Order` drew fits:
        see `agentrl.data.prompts`."""
        if sampler.order is not None and not await fits(sampler, tasks, index, self.measure):
            return False
        return await showable(sampler, self.env, self.chat, tasks, index)

    async def play(
        self,
        tasks: Sequence[Task],
        n: int,
        *,
        seed: Seed,
        limits: Mapping[str, Json] | None = None,
        only: Sequence[Collection[int]] | None = None,
        on_sample: Callable[[int, Trajectory], None] | None = None,
        on_group: Callable[[Group], None] | None = None,
        after: After | None = None,
        label: str = "",
    ) -> list[Group]:
        """`n` samples of every task, groups in the order of `tasks`. limits, label: as of `driver`. only,
        on_sample, on_group, after: as of `roll_out`."""
        driver = self.driver(label, limits)
        return await roll_out(
            driver, tasks, n, seed=seed, only=only, on_sample=on_sample, on_group=on_group, after=after
        )

    def driver(self, label: str = "", limits: Mapping[str, Json] | None = None) -> Driver:
        """What drives requests. label: see `Driver`; sessions of a run have ids of their own when no two
        drivers of it have the same. limits: keys of the recipe's section `rollout` that have another value."""
        section = self.recipe.rollout.model_copy(update=dict(limits or {}))
        options: dict[str, Any] = {
            "engine": self.engine,
            "chat": self.chat,
            "environment": self.env,
            "tools": self.toolbox.tools,
            "limits": section,
            "scorer": Scorer(self.rewards, section.turn_timeout),
            "label": label,
            "workspaces": self.workspaces,
        }
        if self.agent is None or self.gateway is None or self.recipe.agent is None:
            return Driver(**options)
        from agentrl.rollout.agent import AgentDriver  # with a web server

        return AgentDriver(agent=self.agent, gateway=self.gateway, section=self.recipe.agent, **options)

    def describe(self) -> str:
        """One line for the start of a run."""
        return f"{self.size()} · environment {self.env.name} · tools {self.offers()}"

    def size(self) -> str:
        """The model, and how many parameters it has."""
        if self.model is None:
            return self.chat.description
        parameters = sum(p.numel() for p in self.model.parameters())
        size = f"{parameters / 1e6:.2f} M" if parameters < 1e9 else f"{parameters / 1e9:.2f} B"
        return f"model {self.recipe.model.path} ({size} parameters)"

    def offers(self) -> str:
        """The tools, and the agent that calls them."""
        names = ", ".join(tool.name for tool in (*self.toolbox.tools, *self.env.tools())) or "none"
        if self.agent is not None and self.gateway is not None:
            names += f" · agent {self.agent.name} at {self.gateway.url}"
        return names

    async def close(self) -> list[str]:
        """Close, once, when the run ends: tools and environment free what they held, the engine stops. Returns a line
        for each that could not be closed."""
        return await close_all(
            {
                **({"gateway": self.gateway} if self.gateway is not None else {}),
                **({f"agent {self.agent.name!r}": _Bounded(self.agent)} if self.agent is not None else {}),
                "tools": _Bounded(self.toolbox),
                **({"workspaces": _Bounded(self.workspaces)} if self.workspaces is not None else {}),
                "rewards.functions": _Bounded(self.rewards),
                f"environment {self.env.name!r}": _Bounded(self.env),
                "engine": self.engine,
            }
        )


def gateway_of(recipe: Recipe) -> "Gateway":
    """The gateway of a recipe's agent, not started yet."""
    from agentrl.gateway.server import Gateway

    agent = recipe.agent or AgentSection()
    host, port = host_and_port(agent.host)
    return Gateway(
        host=host, port=port, model=recipe.model.path, socket=agent.sandbox is not None, public_url=agent.public_url
    )


def check_tools_of_agent(tools: Sequence[Tool]) -> None:
    """Raise UserError where a tool wants of an agent's rollout what the built-in driver alone can give."""
    if held := [tool.name for tool in tools if tool.converses]:
        raise UserError(
            f"tool {held[0]!r} holds conversations with the model, which it cannot beside `agent`: let the agent start "
            "its sub-agents itself"
        )


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A plugin that is left behind where its `close` hangs."""

    plugin: Agent | Environment | Rewards | Toolbox | Workspaces

    async def close(self) -> None:
        task = asyncio.ensure_future(self.plugin.close())
        done, _ = await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        if not done:
            leave_behind(task)
            raise TimeoutError(f"it does not end within {CLOSE_SECONDS:g} s")
        task.result()


def placed_alone(recipe: Recipe) -> Placement | None:
    """The devices of this process and of the servers that it launches. None: there are too few for each to have
    its own, and servers share those that there are. Raises UserError for flags of servers that should be numbers."""
    import torch

    here = torch.cuda.device_count()
    found = place(recipe.changed(cluster=ClusterSection()), launched_by(recipe.engine), here)
    return None if found.lacking(here) else found


def prepare_torch(recipe: Recipe) -> None:
    """Set seed and threads. Two runs on one machine should share its cores by `train.threads`."""
    import torch

    torch.manual_seed(recipe.train.seed)
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    elif recipe.rollout.overlap != "none" and engine_class(recipe.engine.name).in_process:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # the engine and the trainer work at once
