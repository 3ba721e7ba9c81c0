"""Groups to the numbers of `metrics.jsonl`. Every finish reason has its key, also where it was never reached."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import comb

from agentrl.plugins.types import Task
from agentrl.rollout.compaction import COUNTS
from agentrl.rollout.groups import Contrast, contrast
from agentrl.rollout.workspaces import CHANGES, WAIT
from agentrl.trajectory import UNKNOWN, FinishReason, Group, ToolUse, Trajectory, spread


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of one step's groups (docs/reference/metrics.md).

    `rollout/tokens` sampled; mean, deviation, smallest and largest `rollout/response_tokens` and `rollout/turns` of a
    valid trajectory, `rollout/prompt_tokens_mean`, and mean seconds by what they were spent on
    (`time/sample_engine_s`), of the hooks' those until its workspace was open (`time/sample_workspace_s`);
    `rollout/failed` and `rollout/failed/<boundary>` samples left out, `rollout/retried`
    attempts; `groups/<contrast>` counts of groups whose rewards are varied, equal or few (how many samples an update
    computed is `train/samples`), and `groups/pass_at_<k>`;
    `stop/<reason>` counts; `tool/<name>/calls`, `/errors` and `/cut` (answers that were too long) counts, `/seconds` a
    mean a call, a tool's own metrics means over the calls that have them;
    `reward/<part>` means over the valid trajectories (0 where a part is missing), before `rewards.weights`;
    `reward/mean` is their weighted sum, with its deviation, minimum and maximum beside it. Of rollouts of an agent,
    sums of what their calls were: `gateway/calls`, `/forks`, `/retries`, `/auxiliary`, `/unreceived`, `/unproven`,
    `/ignored`, `/dropped_thinking`; of valid ones, by seat, sums `seat/<seat>/calls` and `/tokens`, and the mean
    `/reward_mean` of those that have one. Where conversations are compacted, `rollout/compactions` and
    `rollout/compactions_failed`: summaries, and those from which it could not be gone on. `workspace/tampering/<kind>`
    counts samples that left something to decide for their grader. `metric/<name>` are an environment's own numbers,
    means over the valid trajectories that have them.
    """
    valid = [t for g in groups for t in g.trajectories]
    failed = [t for g in groups for t in g.failed]
    return {
        **reward_metrics(valid),
        "rollout/tokens": sum(t.sampled_tokens for t in valid),
        **spread("rollout/response_tokens", [t.sampled_tokens for t in valid]),
        **spread("rollout/turns", [len(t.turns) for t in valid]),
        "rollout/prompt_tokens_mean": _mean(t.prompt_length for t in valid),
        "rollout/trajectories": len(valid),
        **_failures(valid, failed),
        **_groups(groups),
        **_pass_at(groups),
        **_seconds(valid),
        **_waits(valid),
        **_stops([*valid, *failed]),
        **_tools(valid),
        **_gateway([*valid, *failed]),
        **_seats(valid),
        **_compactions([*valid, *failed]),
        **_tampering(valid),
        **_own(valid),
    }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def reward_metrics(valid: Sequence[Trajectory]) -> dict[str, float]:
    """reward/<part> of valid trajectories, means before weights, and reward/mean, /std, /min and /max of the
    whole."""
    sums: dict[str, float] = defaultdict(float)
    for trajectory in valid:
        for part, value in trajectory.rewards.items():
            sums[part] += value
    parts = {f"reward/{part}": total / len(valid) for part, total in sorted(sums.items())}
    whole = spread("reward", [t.reward for t in valid])
    return {**parts, **{name.replace("reward_", "reward/"): value for name, value in whole.items()}}


def by_environment(groups: Sequence[Group], name_of: Callable[[Task], str]) -> dict[str, float]:
    """env/<name>/... of each environment of a mixture. name_of: returns the name of a task's environment."""
    parts: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        parts[name_of(group.task)].append(group)
    metrics: dict[str, float] = {}
    for name, those in sorted(parts.items()):
        valid = [t for group in those for t in group.trajectories]
        found = {
            "samples": len(valid),
            "failed": sum(len(group.failed) for group in those),
            "groups_varied": sum(contrast(group) is Contrast.VARIED for group in those),
            "reward_mean": _mean(t.reward for t in valid),
            "turns_mean": _mean(len(t.turns) for t in valid),
            "response_tokens_mean": _mean(t.sampled_tokens for t in valid),
        }
        metrics |= {f"env/{name}/{key}": value for key, value in found.items()}
    return metrics


def _pass_at(groups: Sequence[Group]) -> dict[str, float]:
    """groups/pass_at_<k> for k = 2, 4, ... and the largest group: the expected largest reward of k samples of a
    task, drawn without putting back, mean over the groups that have as many (for rewards of 0 and 1, pass@k)."""
    most = max((len(group.trajectories) for group in groups), default=0)
    metrics = {}
    for k in sorted({2**i for i in range(1, most.bit_length()) if 2**i <= most} | ({most} if most > 1 else set())):
        rewards = [sorted(t.reward for t in group.trajectories) for group in groups]
        metrics[f"groups/pass_at_{k}"] = _mean(_expected_best(earned, k) for earned in rewards if len(earned) >= k)
    return metrics


def _expected_best(rewards: Sequence[float], k: int) -> float:
    """The mean of the largest over all choices of k of these ascending rewards."""
    choices = comb(len(rewards), k)
    return sum(reward * (comb(index, k - 1) / choices) for index, reward in enumerate(rewards))


def _seconds(valid: Sequence[Trajectory]) -> dict[str, float]:
    parts = ("engine", "tools", "environment", "hooks")
    return {f"time/sample_{part}_s": _mean(t.seconds.get(part, 0.0) for t in valid) for part in parts}


def _waits(valid: Sequence[Trajectory]) -> dict[str, float]:
    waits = [[s.end - s.start for s in t.spans if s.part == WAIT][:1] for t in valid if CHANGES in t.extra]
    return {"time/sample_workspace_s": _mean(sum(one) for one in waits)} if waits else {}


def _failures(valid: Sequence[Trajectory], failed: Sequence[Trajectory]) -> dict[str, float]:
    boundaries = Counter(t.failure.boundary for t in failed if t.failure is not None)
    everyone = [*valid, *failed]
    return {
        "rollout/failed": len(failed),
        **{f"rollout/failed/{boundary}": count for boundary, count in sorted(boundaries.items())},
        "rollout/retried": sum(len(t.extra.get("retried", ())) for t in everyone),
        "rollout/release_errors": sum(len(t.extra.get("release_errors", ())) for t in everyone),
    }


def _tampering(valid: Sequence[Trajectory]) -> dict[str, float]:
    """Samples by the kinds of what they left to decide for their graders; nothing where none did."""
    kinds = Counter(k for t in valid for k in {line.partition(":")[0] for line in t.extra.get("tampering", ())})
    return {f"workspace/tampering/{kind.replace(' ', '_')}": count for kind, count in sorted(kinds.items())}


def _own(valid: Sequence[Trajectory]) -> dict[str, float]:
    """What environments count themselves (`Session.metrics`)."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in valid:
        for name, value in trajectory.extra.get("metrics", {}).items():
            values[name].append(value)
    return {f"metric/{name}": _mean(numbers) for name, numbers in sorted(values.items())}


def _groups(groups: Sequence[Group]) -> dict[str, float]:
    found = Counter(contrast(group) for group in groups)
    return {f"groups/{kind}": found[kind] for kind in Contrast}


def _stops(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    reasons = Counter(t.finish for t in trajectories)
    return {f"stop/{reason}": reasons[reason] for reason in FinishReason}


def _gateway(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        counts.update(trajectory.extra.get("gateway", {}))
    return {f"gateway/{name}": count for name, count in sorted(counts.items())}


def _seats(valid: Sequence[Trajectory]) -> dict[str, float]:
    calls: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    rewards: dict[str, list[float]] = defaultdict(list)
    for trajectory in valid:
        for turn in trajectory.turns:
            if turn.role:
                calls[turn.role] += 1
                tokens[turn.role] += turn.end - turn.start
        for seat, value in trajectory.seats.items():
            rewards[seat].append(value)
    metrics: dict[str, float] = {}
    for seat in sorted({*calls, *rewards}):
        metrics |= {f"seat/{seat}/calls": calls[seat], f"seat/{seat}/tokens": tokens[seat]}
        if seat in rewards:
            metrics[f"seat/{seat}/reward_mean"] = _mean(rewards[seat])
    return metrics


def _compactions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    extras = [t.extra for t in trajectories if COUNTS[0] in t.extra]
    return {f"rollout/{name}": sum(extra[name] for extra in extras) for name in COUNTS if extras}


def _tools(valid: Sequence[Trajectory]) -> dict[str, float]:
    uses: dict[str, list[ToolUse]] = {name: [] for t in valid for name in t.tools}
    for trajectory in valid:
        for use in trajectory.tool_uses:
            uses.setdefault(use.name if use.name in trajectory.tools else UNKNOWN, []).append(use)
    metrics: dict[str, float] = {}
    for name, calls in sorted(uses.items()):
        own: dict[str, list[float]] = defaultdict(list)
        for use in calls:
            for key, value in use.metrics.items():
                own[key].append(value)
        metrics |= {f"tool/{name}/{key}": _mean(values) for key, values in sorted(own.items())}
        metrics[f"tool/{name}/calls"] = len(calls)
        metrics[f"tool/{name}/errors"] = sum(use.error is not None for use in calls)
        metrics[f"tool/{name}/cut"] = sum(use.cut for use in calls)
        metrics[f"tool/{name}/seconds"] = _mean(use.seconds for use in calls)
    return metrics
