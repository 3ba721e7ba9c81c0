"""Groups to the numbers of `metrics.jsonl`. Every finish reason has its key, also where it was never reached."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from agentrl.rollout.compaction import COUNTS
from agentrl.rollout.groups import Contrast, contrast
from agentrl.trajectory import UNKNOWN, FinishReason, Group, ToolUse, Trajectory


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of one step's groups.

    `rollout/tokens` sampled, `rollout/turns_mean`, `rollout/prompt_tokens_mean` a valid trajectory; `rollout/failed`
    and `rollout/failed/<boundary>` samples left out, `rollout/retried` attempts; `groups/<contrast>` counts of groups
    whose rewards are varied, equal or few (how many samples an update computed is `train/samples`);
    `stop/<reason>` counts; `tool/<name>/calls`, `/errors` and `/cut` (answers that were too long) counts, `/seconds` a
    mean a call, a tool's own metrics means over the calls that have them;
    `reward/<part>` means over the valid trajectories (0 where a part is missing), before `rewards.weights`;
    `reward/mean` is their weighted sum. Of rollouts of an agent, sums of what their calls were: `gateway/calls`,
    `/forks`, `/retries`, `/auxiliary`, `/dropped_thinking`. Where conversations are compacted, `rollout/compactions`
    and `rollout/compactions_failed`: summaries, and those from which it could not be gone on.
    """
    valid = [t for g in groups for t in g.trajectories]
    failed = [t for g in groups for t in g.failed]
    return {
        **_rewards(valid),
        "rollout/tokens": sum(t.sampled_tokens for t in valid),
        "rollout/turns_mean": _mean(len(t.turns) for t in valid),
        "rollout/prompt_tokens_mean": _mean(t.prompt_length for t in valid),
        "rollout/trajectories": len(valid),
        **_failures(valid, failed),
        **_groups(groups),
        **_stops([*valid, *failed]),
        **_tools(valid),
        **_gateway([*valid, *failed]),
        **_compactions([*valid, *failed]),
    }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def _rewards(valid: Sequence[Trajectory]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for trajectory in valid:
        for part, value in trajectory.rewards.items():
            sums[part] += value
    rewards = {f"reward/{part}": total / len(valid) for part, total in sorted(sums.items())}
    return {**rewards, "reward/mean": _mean(t.reward for t in valid)}


def _failures(valid: Sequence[Trajectory], failed: Sequence[Trajectory]) -> dict[str, float]:
    boundaries = Counter(t.failure.boundary for t in failed if t.failure is not None)
    everyone = [*valid, *failed]
    return {
        "rollout/failed": len(failed),
        **{f"rollout/failed/{boundary}": count for boundary, count in sorted(boundaries.items())},
        "rollout/retried": sum(len(t.extra.get("retried", ())) for t in everyone),
        "rollout/release_errors": sum(len(t.extra.get("release_errors", ())) for t in everyone),
    }


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
