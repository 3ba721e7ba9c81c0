"""`Measure`: what of its samples two evaluations are compared by: solved tasks, rewards, turns, tokens, time, cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import UserError, nearest
from agentrl.eval.outcome import Outcome
from agentrl.eval.result import cost

Prices = Mapping[str, float]
SOLVED, REWARD = "solved", "reward"
_PLAIN: Mapping[str, Callable[[Outcome], float]] = {
    SOLVED: lambda one: float(bool(one.solved)),
    REWARD: lambda one: one.reward,
    "turns": lambda one: float(one.turns),
    "tokens": lambda one: float(one.tokens),
    "seconds": lambda one: one.seconds,
    "tool_errors": lambda one: float(sum(call.wrong for call in one.calls)),
}
COST = "cost"
NAMES = (*_PLAIN, COST)
"""What every sample has; the names of its reward parts, and of the scanners that read it, come on top."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of each sample."""

    name: str
    """`solved`, `reward`, `turns`, `tokens`, `seconds`, `tool_errors`, `cost`, or the name of a reward part or of a
    scanner: 1 where it found something."""

    @property
    def share(self) -> bool:
        """Whether it is the share of samples that solve their task, told in points."""
        return self.name == SOLVED

    def value(self, outcome: Outcome, prices: Prices) -> float:
        """Its value of a sample. prices: of a million tokens by kind, of the evaluation's endpoint."""
        if self.name == COST:
            return cost(outcome.usage, prices)
        if (read := _PLAIN.get(self.name)) is not None:
            return read(outcome)
        return outcome.rewards.get(self.name, outcome.findings.get(self.name, 0.0))

    def told(self, value: float, sign: bool = False) -> str:
        """A difference of it, or a mean, in a text: points of a share."""
        if self.share:
            return f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
        return f"{value:+.4g}" if sign else f"{value:.4g}"

    def mean(self, value: float) -> str:
        """A mean of it in a table."""
        return f"{value:.1%}" if self.share else f"{value:.4g}"


def measure_of(name: str, played: Sequence[Sequence[Outcome]], prices: Sequence[Prices]) -> Measure:
    """The measure of this name. played: the samples of each evaluation; prices: likewise.

    Raises UserError: no sample has it.
    """
    rewards = sorted({part for outcomes in played for one in outcomes for part in one.rewards})
    scans = [{scanner for one in outcomes for scanner in one.findings} for outcomes in played]
    parts = [*rewards, *sorted(set.union(*scans).difference(rewards))]
    if name not in (*NAMES, *parts):
        known = ", ".join((*NAMES, *parts))
        raise UserError(
            f"--on {name}: not a number of the samples, which have {known}{nearest(name, [*NAMES, *parts])}"
        )
    unread = [index for index, scan in enumerate(scans, 1) if name not in scan]
    if name not in {*NAMES, *rewards} and unread:
        raise UserError(f"--on {name}: evaluation {unread[0]} of {len(scans)} was not scanned: run `agentrl scan`")
    if name == COST:
        for index, (outcomes, known_prices) in enumerate(zip(played, prices, strict=True)):
            if not known_prices or not any(one.usage for one in outcomes):
                why = "the recipe has no prices (engine.args.prices)" if not known_prices else "no tokens were counted"
                raise UserError(f"--on cost: evaluation {index + 1} of {len(played)} has no cost: {why}")
    return Measure(name)


def chosen(played: Sequence[Sequence[Outcome]]) -> tuple[Measure, str | None]:
    """What is compared where nobody said so: solved tasks, or the mean reward where `solved` is the same of all samples
    and the reward is not; and a line about that."""
    valid = [one for outcomes in played for one in outcomes if one.valid]
    if len({bool(one.solved) for one in valid}) == 1 and len({one.reward for one in valid}) > 1:
        which = "every sample is solved" if valid[0].solved else "no sample is solved"
        return Measure(REWARD), f"{which}, so the mean reward is compared"
    return Measure(SOLVED), None
