"""Whether the conditions of health say what is wrong with a run, and nothing of a run that is well.

    python benchmarks/health.py
    python benchmarks/health.py --add RUN well:NAME      # keep the rows of a run, as data of this benchmark

First table: pathologies that were planted, what was said first, and whether it is right by name and by cause. They are
short real runs, or rows of healthy runs that were altered from one step on as the pathology alters them. Those marked
"after" were made once the conditions were frozen: 13 of 18 were named right then. From two of the others it was learned
that a trend is no break and that entropies near 0 are noisy; two had been planted into a run that raised something
already. Some have a mild finding of their cause first, which is not counted. Second table: healthy runs of shipped
recipes, with smaller steps than the recipes have but for those named "whole", which are the recipes as they ship;
thresholds were set on "well", and are shown on "shown". Two of sub_agents learn too, and a third of their samples run
out of tokens, which is said: they are listed, and not counted. Exits with 1 where less than 95 % of the pathologies are
named right, or a healthy run raises anything.

The rows (`health.jsonl.gz`) are of runs on two cores that others used too: their times are noisy, and left out of the
run that was evaluated every five steps ("eval").
"""

import argparse
import gzip
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from agentrl.learner.monitors import Finding, Health
from agentrl.recipe.schema import Recipe

DATA = Path(__file__).with_name("health.jsonl.gz")
SECTIONS = ("rollout", "algorithm", "train", "critic", "rewards")
LEFT_OUT = ("memory/", "groups/pass_at", "time/sync", "seat/")
ENDS = ("_per_s", "/mfu", "/tflops", "_std", "/parameters", "prompt_tokens_mean")
CUT = ("sub_agents_0", "sub_agents_1")
"""Runs of which it is true that many samples run out of tokens."""
FROM = 15
"""The step from which on rows are altered."""

Row = dict[str, Any]
Rows = list[Row]
Change = Callable[[Row, int, random.Random], Row]
"""Gives what is other in a row; of the row, the number of steps since the pathology began, and random numbers."""


class Run(NamedTuple):
    """A run as the data holds it."""

    kind: str
    """`well`, `shown` or `sick`."""
    name: str
    recipe: Row
    rows: Rows


class Planted(NamedTuple):
    """A pathology."""

    what: str
    """In words."""
    run: str
    """Name of the run that has it, or whose rows are altered."""
    names: tuple[str, ...]
    """The conditions that name it."""
    causes: tuple[str, ...] = ()
    """What may be named as the first cause; empty: that is the condition itself."""
    change: Change | None = None
    """How rows are altered from FROM on; None: the run has it itself."""
    recipe: Mapping[str, Any] = MappingProxyType({})
    """Keys of the recipe that are other."""
    late: bool = False
    """Whether it was made after the conditions were frozen."""
    resumed: bool = False
    """Whether the run was resumed at FROM."""
    mild: Mapping[str, float] = MappingProxyType({})
    """Metrics of all rows, which raise a mild finding of the same cause first."""


def noisy(value: float, rng: random.Random, by: float = 0.05) -> float:
    return value * (1 + rng.uniform(-by, by))


def scaled(times: float, *keys: str, steps: int = 1) -> Change:
    """Multiply metrics: by `times` in the end, in equal ratios over `steps`."""

    def change(row: Row, at: int, rng: random.Random) -> Row:
        ratio = times ** min(1.0, (at + 1) / steps)
        return {key: noisy(row[key] * ratio, rng) for key in keys if key in row}

    return change


def fixed(**given: float) -> Change:
    """Set metrics, `__` for the slash."""
    return lambda row, at, rng: {key.replace("__", "/"): value for key, value in given.items()}


def both(*changes: Change) -> Change:
    return lambda row, at, rng: {key: value for change in changes for key, value in change(row, at, rng).items()}


def share(key: str, part: float) -> Change:
    """Make a count of samples this share of the step's."""
    return lambda row, at, rng: {key: round(row["rollout/trajectories"] * min(1.0, noisy(part, rng)))}


def tool_down(name: str) -> Change:
    def change(row: Row, at: int, rng: random.Random) -> Row:
        calls = row.get(f"tool/{name}/calls", 0)
        return {f"tool/{name}/errors": calls, "reward/mean": row["reward/mean"] * 0.1}

    return change


def one_group(row: Row, at: int, rng: random.Random) -> Row:
    """One group in sixteen that teaches."""
    count = row["groups/varied"] + row["groups/equal"]
    varied = int(at % max(1, 16 // count) == 0)
    return {"groups/varied": varied, "groups/equal": count - varied, "reward/mean": noisy(0.04, rng)}


def some_fail(row: Row, at: int, rng: random.Random) -> Row:
    """One sample fails in two of three steps."""
    if at % 3 == 0:
        return {}
    return {"rollout/failed": 1, "rollout/trajectories": row["rollout/trajectories"] - 1, "rollout/failed/tool": 1}


def graded_nothing(row: Row, at: int, rng: random.Random) -> Row:
    """A grader that broke, of samples that are what they were."""
    return {
        "reward/mean": 0.0, "reward/max": 0.0, "groups/varied": 0, "train/samples": 0, "train/updates": 0,
        "groups/equal": row["groups/varied"] + row["groups/equal"], "train/grad_norm": 0.0,
    }  # fmt: skip


def unreadable(row: Row, at: int, rng: random.Random) -> Row:
    """Of the calls a tenth more cannot be read in each step."""
    calls = row["tool/calculator/calls"]
    wrong = round(calls * min(0.9, 0.1 * (at + 1)))
    return {
        "calls/unreadable": wrong, "tool/calculator/calls": calls - wrong, "tool/unknown/calls": wrong,
        "tool/unknown/errors": wrong, "reward/mean": row["reward/mean"] * (1 - wrong / max(1, calls)),
    }  # fmt: skip


def gamed(row: Row, at: int, rng: random.Random) -> Row:
    """A part that rises at the cost of another, which weighs less."""
    return {"reward/short": noisy(0.95, rng, 0.02), "reward/goal": noisy(0.15, rng)}


def by_heart(row: Row, at: int, rng: random.Random) -> Row:
    """Evaluations after the 16th and after every fifth step: the best, then ever lower."""
    if at % 5 != 1:
        return {}
    value = 0.9 - 0.1 * (at // 5)
    return {f"eval/test/accuracy{end}": value + by for end, by in (("", 0.0), ("_low", -0.04), ("_high", 0.04))}


def dead(row: Row, at: int, rng: random.Random) -> Row:
    """What a destroyed policy samples."""
    samples = row["rollout/trajectories"]
    return {
        "reward/mean": 0.0, "stop/length": samples, "stop/stop": 0, "groups/varied": 0, "train/samples": 0,
        "groups/equal": row["groups/varied"] + row["groups/equal"], "train/updates": 0, "train/grad_norm": 0.0,
        "rollout/response_tokens_mean": 6 * row["rollout/response_tokens_mean"],
    }  # fmt: skip


PLANTED = (
    Planted("learning rate 0.05", "lr_0.05", ("policy_broken",), ("train.lr",)),
    Planted("learning rate 0.005", "lr_5e-3", ("policy_broken",), ("train.lr",)),
    Planted("entropy bonus of 1", "entropy_coef", ("policy_broken", "entropy_grows"), ("algorithm.entropy_coef",)),
    Planted("one turn for tasks of three", "max_turns", ("turns_used_up",), ("limits",)),
    Planted("a reward that pays for length", "longer", ("cut_by_length", "part_gamed", "length_grows"), ("reward",)),
    Planted("24 updates a step", "clip", ("updates_too_large",), ("train.lr",)),
    Planted("a judge that is away for a fifth", "judge", ("samples_failed",), ("reward fails",)),
    Planted("critic.lr 0.3", "critic", ("critic_poor",), ("critic.lr",)),
    Planted("one task in sixteen can be earned", "rare", ("few_teach",), ("tasks",)),
    Planted("a reward that is the same for all", "flat", ("no_contrast",), ("reward",)),
    Planted("tools that the model never saw", "unknown", ("tools_unknown", "calls_unreadable")),
    Planted("turns of 8 tokens", "cut", ("calls_cut",)),
    Planted("temperature 0", "greedy", ("no_contrast",), ("sampling",)),
    Planted("the reward falls by a tenth a step", "gsm8k_tool_0", ("reward_falls",), ("train.lr",),
            scaled(0.3, "reward/mean", steps=12)),
    Planted("entropy falls to a fiftieth, reward as at first", "gsm8k_tool_1", ("entropy_collapse", "reward_falls"),
            ("train.lr",), both(scaled(0.02, "train/entropy", steps=3), scaled(0.4, "reward/mean"))),
    Planted("samples grow fourfold", "gsm8k_tool_0", ("length_grows", "reward_falls"), ("length",),
            both(scaled(4, "rollout/response_tokens_mean", "rollout/tokens", steps=6), scaled(0.6, "reward/mean"))),
    Planted("mismatch/kl 0.05", "gsm8k_tool_1", ("mismatch",), (), fixed(mismatch__kl=0.05)),
    Planted("the critic is worse than the mean", "gsm8k_ppo_0", ("critic_poor",), ("critic.lr",),
            fixed(critic__explained_variance=-0.3)),
    Planted("gradient 0", "gsm8k_tool_0", ("gradient_zero",), ("gradient",), fixed(train__grad_norm=0.0)),
    Planted("gradient 200 times larger", "gsm8k_tool_1", ("gradient_large", "gradient_spike"), ("gradient",),
            scaled(200, "train/grad_norm")),
    Planted("steps take six times as long", "gsm8k_tool_0", ("steps_slow",), ("time",),
            scaled(6, "time/step_s", "time/rollout_s", "time/sample_engine_s")),
    Planted("a sample fails in two of three steps", "gsm8k_tool_1", ("samples_failed",), ("tool fails",), some_fail),
    Planted("a tool goes down", "gsm8k_tool_0", ("tool_fails",), ("tool/calculator",), tool_down("calculator")),
    Planted("weights do not reach the server", "gsm8k_tool_1", ("policy_broken", "mismatch"), ("sync", "mismatch"),
            both(scaled(0.05, "reward/mean"), scaled(4, "train/entropy"),
                 fixed(mismatch__logprob_mean=0.6, mismatch__kl=0.4, mismatch__ess=0.3)),
            {"engine": {"name": "sglang"}}),
    Planted("resumed with another recipe", "gsm8k_tool_0", ("policy_broken",), ("resume",), dead, resumed=True),
    Planted("samples four updates old", "gsm8k_tool_1", ("stale",), ("rollout.max_staleness",),
            fixed(rollout__staleness_mean=4.0)),
    Planted("a gradient that is not finite", "gsm8k_tool_0", ("update_discarded",), ("train.lr",),
            fixed(train__updates_not_finite=1, train__updates=0)),
    Planted("a tool that takes 4 of 5 seconds", "gsm8k_tool_1", ("tool_slow",), ("tool/calculator/seconds",),
            fixed(tool__calculator__seconds=4.0)),
    Planted("one update destroys it in mid-run", "gsm8k_tool_mini", ("policy_broken",), ("train.lr",), dead),
    Planted("one update destroys it, after updates too large", "gsm8k_tool_mini", ("policy_broken",), ("train.lr",),
            dead, mild={"train/clip_fraction": 0.25}),
    Planted("the reward falls to a thirtieth, after updates too large", "gsm8k_tool_0", ("reward_falls",),
            ("train.lr",), scaled(0.03, "reward/mean", steps=12), mild={"train/approx_kl": 0.03}),
    Planted("one update destroys a game, after updates too large", "text_game_1", ("policy_broken",), ("train.lr",),
            dead, mild={"train/ratio_mean": 1.08}),
    # made after the conditions were frozen
    Planted("compact, learning rate 0.03", "late_compact", ("policy_broken",), ("train.lr",), late=True),
    Planted("PPO, learning rate 0.01", "late_ppo", ("policy_broken", "updates_too_large"), ("train.lr",), late=True),
    Planted("the grader gives 0 to all", "gsm8k_tool_7", ("no_contrast", "reward_falls", "policy_broken"),
            ("reward", "environment"), graded_nothing, late=True),
    Planted("the KL to the reference grows to 0.5", "gsm8k_tool_7", ("kl_high",), ("algorithm.kl_coef",),
            lambda row, at, rng: {"train/kl": noisy(min(0.5, 0.05 * 1.5**at), rng)}, late=True),
    Planted("two fifths of the tokens are clipped", "gsm8k_ppo_2", ("updates_too_large",), ("train.lr",),
            lambda row, at, rng: {"train/clip_fraction": noisy(0.4, rng), "train/approx_kl": noisy(0.015, rng)},
            late=True),
    Planted("samples shrink to a fifth", "compact_0", ("length_shrinks", "reward_falls", "policy_broken"),
            ("length", "train.lr"),
            both(scaled(0.2, "rollout/response_tokens_mean", steps=3), scaled(0.5, "reward/mean")), late=True),
    Planted("all samples out of tool calls", "compact_0", ("turns_used_up",), ("limits",),
            both(share("stop/max_tool_calls", 0.95), scaled(0.6, "reward/mean")), late=True),
    Planted("one group in sixteen teaches", "gsm8k_tool_7", ("few_teach", "reward_falls"), ("tasks", "train.lr"),
            one_group, late=True),
    Planted("the tool of a game goes down", "text_game_1", ("tool_fails",), ("tool/move",), tool_down("move"),
            late=True),
    Planted("release raises twice a step", "gsm8k_ppo_2", ("release_errors",), (), fixed(rollout__release_errors=2),
            late=True),
    Planted("steps take four times as long, three times the tokens", "compact_0",
            ("steps_slow", "length_grows", "reward_falls"), ("length",),
            both(scaled(4, "time/step_s", "time/rollout_s"),
                 scaled(3.5, "rollout/tokens", "rollout/response_tokens_mean"), scaled(0.5, "reward/mean")), late=True),
    Planted("half of the answers are received by nobody", "agent_openai_0", ("answers_unreceived",), (),
            lambda row, at, rng: {"gateway/unreceived": round(noisy(0.5, rng) * row["gateway/calls"])}, late=True),
    Planted("two fifths run out of time", "compact_1", ("cut_by_time",), (), share("stop/timeout", 0.4), late=True),
    Planted("entropy grows by a fifth a step", "gsm8k_tool_7", ("entropy_grows", "reward_falls"),
            ("train.lr",), both(lambda row, at, rng: {"train/entropy": noisy(0.2 * 1.2 ** (at + 1), rng)},
                                scaled(0.5, "reward/mean", steps=8)), late=True),
    Planted("calls become unreadable, step by step", "gsm8k_ppo_2", ("calls_unreadable", "policy_broken"),
            ("calls_unreadable", "train.lr"), unreadable, late=True),
    Planted("one part of the reward is gamed", "text_game_1", ("part_gamed", "reward_falls"), ("reward",), gamed,
            late=True),
    Planted("held-out accuracy falls while the reward rises", "gsm8k_tool_7", ("accuracy_falls",), ("reward",),
            by_heart, late=True),
    Planted("the learning rate jumps tenfold", "compact_1", ("policy_broken",), ("train.lr",),
            both(dead, fixed(train__lr=2e-3)), late=True),
)  # fmt: skip


def read() -> dict[str, Run]:
    """The runs of the data, by name."""
    with gzip.open(DATA, "rt") as lines:
        return {run.name: run for run in (Run(**json.loads(line)) for line in lines)}


def said(run: Run, planted: Planted | None = None) -> Iterator[tuple[int, Finding]]:
    """Yield what health says of a run, with the step; of an altered one from FROM on."""
    changed = dict(planted.recipe) if planted else {}
    recipe = Recipe.model_validate(run.recipe | changed)
    health, rng = Health(recipe), random.Random(planted.what if planted else "")
    yield from ((0, finding) for finding in health.before_start())
    rows = []
    for row in run.rows:
        row = row | (planted.mild if planted and row["step"] else {})
        if planted is not None and planted.change is not None and row["step"] >= FROM:
            row = row | planted.change(row, row["step"] - FROM, rng)
        if planted is not None and planted.resumed and row["step"] == FROM:
            health = Health(recipe, rows)
        found = health.step(row)
        rows.append(row | ({"health": [one._asdict() for one in found]} if found else {}))
        yield from ((row["step"], finding) for finding in found)


def right(planted: Planted, found: list[tuple[int, Finding]]) -> bool:
    """Whether the first thing that was said, after the mild finding if there is one, names the pathology and its cause,
    and not before it was there."""
    early = [one for one in found if planted.change is not None and one[0] < FROM]
    if len(early) != bool(planted.mild) or len(found) == len(early):
        return False
    first = found[len(early)][1]
    return first.name in planted.names and first.cause in (planted.causes or planted.names)


def pathologies(runs: dict[str, Run]) -> tuple[Table, list[bool]]:
    """The first table, and whether each was named right."""
    table = Table("planted", "in", "said first", "cause", "step", "right", "also said", title="pathologies")
    results = []
    for planted in PLANTED:
        found = [*said(runs[planted.run], planted)]
        results.append(right(planted, found))
        found = found[bool(planted.mild) :]
        step, first = found[0] if found else ("", Finding("nothing", ""))
        where = ("real run" if planted.change is None else planted.run) + (", after" if planted.late else "")
        others = ", ".join(dict.fromkeys(one.name for _, one in found[1:] if one.name != first.name))
        table.add_row(planted.what, where, first.name, first.cause, str(step), "yes" if results[-1] else "NO", others)
    return table, results


def healthy(runs: dict[str, Run]) -> tuple[Table, int]:
    """The second table, and how many of the runs raise something."""
    table, alarms = Table("run", "kind", "steps", "reward", "said", title="healthy runs"), 0
    for run in runs.values():
        if run.kind == "sick":
            continue
        found = [f"{finding.name} ({step})" for step, finding in said(run)]
        alarms += bool(found) and run.name not in CUT
        rewards = [row["reward/mean"] for row in run.rows if "reward/mean" in row]
        ends = f"{sum(rewards[:3]) / 3:.2f} -> {sum(rewards[-3:]) / 3:.2f}"
        table.add_row(run.name, run.kind, str(run.rows[-1]["step"]), ends, ", ".join(found) or "nothing")
    return table, alarms


def add(folder: Path, name: str) -> None:
    """Keep the rows of a run as data. name: kind:name."""
    kind, _, name = name.partition(":")
    given = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe = {key: given[key] for key in SECTIONS if given.get(key)}
    recipe["rewards"] = {"weights": (given.get("rewards") or {}).get("weights", {})}
    rows = [kept(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    runs = (read() if DATA.exists() else {}) | {name: Run(kind, name, recipe, rows)}
    with gzip.GzipFile(DATA, "wb", mtime=0) as out:
        out.write("".join(json.dumps(run._asdict()) + "\n" for run in runs.values()).encode())


def kept(row: Row) -> Row:
    """The metrics of a row that conditions may read, to four digits."""
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in row.items()
        if isinstance(value, int | float) and not key.startswith(LEFT_OUT) and not key.endswith(ENDS)
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("RUN", "KIND:NAME"), help="keep the rows of a run")
    arguments = parser.parse_args()
    if arguments.add:
        add(Path(arguments.add[0]), arguments.add[1])
        return
    runs, out = read(), Console(width=200)
    first, results = pathologies(runs)
    second, alarms = healthy(runs)
    late = [ok for planted, ok in zip(PLANTED, results, strict=True) if planted.late]
    wells = sum(run.kind != "sick" and run.name not in CUT for run in runs.values())
    out.print(first, second)
    out.print(
        f"named right: {sum(results)} of {len(results)}; of those made after the freeze {sum(late)} of {len(late)}"
    )
    out.print(f"healthy runs that raise anything: {alarms} of {wells}")
    sys.exit(int(alarms > 0 or sum(results) < 0.95 * len(results)))


if __name__ == "__main__":
    main()
