"""The first lines of a run, in plain words: what is trained, on what, and how it is sampled."""

from agentrl.plugins.mixture import left_out
from agentrl.recipe.schema import Recipe
from agentrl.recipe.sections.algorithm import AlgorithmSection
from agentrl.rollout.player import Player
from agentrl.training.preflight import Checked

_KL = {"loss": "a KL term in the loss", "reward": "a KL penalty on the reward"}


def introduction(recipe: Recipe, checked: Checked, player: Player, stored: int = 0) -> list[str]:
    """The lines. stored: steps of stored rollouts that are trained on; 0: rollouts are sampled."""
    return [
        f"trained: {player.size()}, by {_algorithm(recipe.algorithm)}",
        f"tasks: {_tasks(recipe, checked)}",
        f"steps: {_steps(recipe, stored)}",
        *([] if stored else [f"sampled: {_sampling(recipe)}"]),
        f"tools: {player.offers()}",
        *left_out(checked.env, player.toolbox.tools, recipe.agent),
    ]


def _algorithm(section: AlgorithmSection) -> str:
    parts = [f"advantages {section.advantage.name}", f"loss {section.loss.name}"]
    parts += [_KL[section.kl_in]] if section.kl_coef else []
    return ", ".join(parts)


def _tasks(recipe: Recipe, checked: Checked) -> str:
    """How many tasks of which environment, and which are held out when."""
    found = f"{len(checked.tasks):,} of environment {checked.env.name}"
    splits = list(dict.fromkeys((*checked.splits, *([checked.choosing] if checked.choosing else []))))
    if not splits:
        return f"{found}; none is held out"
    section = recipe.eval
    most = f"up to {section.tasks} of each" if section.tasks else "all of them"
    when = [
        *(["first"] if section.before else []),
        *([f"every {section.every} steps"] if section.every else []),
        "last",
    ]
    return f"{found}; held out: {', '.join(splits)} ({most}, evaluated {', '.join(when)})"


def _steps(recipe: Recipe, stored: int) -> str:
    if stored:
        return f"{min(stored, recipe.train.steps)} of stored rollouts"
    tasks, n = recipe.rollout.tasks, recipe.rollout.n
    return f"{recipe.train.steps} of {tasks} tasks with {n} samples each; learning rate {recipe.train.lr:g}"


def _sampling(recipe: Recipe) -> str:
    r = recipe.rollout
    return (
        f"by the engine {recipe.engine.name} at temperature {r.temperature:g}; at most {r.max_turns} turns of "
        f"{r.max_turn_tokens} tokens, {r.max_tokens:,} tokens in all"
    )
