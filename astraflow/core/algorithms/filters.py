"""Rollout filters: what of a whole group is trained on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from astraflow.core.algorithms.finding import with_options
from astraflow.core.algorithms.points import RolloutFilter, WholeGroup
from astraflow.core.rollouts import Outcome
from astraflow.core.samples import rows_by_agent
from astraflow.core.tasks import Prompt


@dataclass(slots=True, kw_only=True)
class ZeroAdvantage(RolloutFilter):
    """Keeps a group only if its rewards, of some agent, differ by more than a tolerance.

    Advantages are relative to the rows of the same agent in the group, so that equal rewards give a
    gradient of zero. Dropping such groups and asking other prompts until the batch is full is the
    dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). Example: rewards 1, 1, 1 are dropped,
    1, 0, 1 are kept.

    Attributes:
        tolerance: Rewards that differ by no more are equal.
    """

    tolerance: float = 1e-6

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        rows = (row for sample in group.samples for row in sample.rows)
        rewards = ([row.reward for row in same] for same in rows_by_agent(rows).values())
        differs = any(max(same) - min(same) > self.tolerance for same in rewards)
        return [differs] * len(group.samples)


@dataclass(slots=True, kw_only=True)
class RewardRange(RolloutFilter):
    """Keeps a group whose mean reward lies in a range, both ends included.

    Example: with low 0.2 and high 0.8, rewards 1, 0, 0, 0 (mean 0.25) are kept, and 1, 1, 1, 1
    are dropped.

    Attributes:
        low: Least mean reward.
        high: Largest mean reward.
    """

    low: float = -inf
    high: float = inf

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        mean = sum(group.rewards) / len(group.rewards)
        return [self.low <= mean <= self.high] * len(group.samples)


@dataclass(slots=True, kw_only=True)
class Length(RolloutFilter):
    """Keeps rollouts by the tokens that were sampled for the policy, over all its trajectories.

    Example: with max_tokens 100, of rollouts with 80, 100 and 101 sampled tokens the last is
    dropped, and the advantages are those of a group of two.

    Attributes:
        min_tokens: Fewest.
        max_tokens: Most; None: any number.
    """

    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError("max_tokens is below min_tokens")

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        counts = [
            sum(row.trajectory.sampled_count for row in sample.rows) for sample in group.samples
        ]
        most = self.max_tokens
        return [self.min_tokens <= n and (most is None or n <= most) for n in counts]


@dataclass(slots=True, kw_only=True)
class Truncated(RolloutFilter):
    """Keeps rollouts that came to their own end.

    What was cut at a limit of tokens has a reward that says little of what it would have been
    (overlong filtering, DAPO, arXiv 2503.14476, section 3.4). Example: rewards 1, 0 and 0, the last
    one cut. Dropped, the others have advantages 0.5 and -0.5; masked, as in the paper, the baseline
    is that of all three: 2/3 and -1/3, and the last one is in the batch without a loss.

    Attributes:
        max_share: Drop the whole group when more than this share of it was cut.
        action: drop: before baselines. mask: they count for them, and no loss token is theirs.
    """

    max_share: float = 1.0
    action: Literal["drop", "mask"] = "drop"

    def __post_init__(self) -> None:
        if not 0 <= self.max_share <= 1:
            raise ValueError("max_share must be in [0, 1]")

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        is_cut = _is_cut(group)
        if is_cut.count(True) / len(is_cut) > self.max_share:
            return [False] * len(is_cut)
        return [self.action == "mask" or not cut for cut in is_cut]

    def masks(self, group: WholeGroup) -> Sequence[bool]:
        return _is_cut(group)


def _is_cut(group: WholeGroup) -> list[bool]:
    return [rollout.outcome is Outcome.TRUNCATED for rollout in group.rollouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a group has to be; all that is set has to hold.

    Attributes:
        data_sets: It comes from one of these; empty: any.
        labels: Its prompt has these labels, or fields that read so.
        min_reward: Least mean reward.
        max_reward: Largest mean reward.
        max_staleness: Versions that the next batch is ahead of its oldest sample, at most.
        from_s: Seconds since the start of the run, at least.
        until_s: Seconds since the start of the run, below.
    """

    data_sets: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    min_reward: float | None = None
    max_reward: float | None = None
    max_staleness: int | None = None
    from_s: float | None = None
    until_s: float | None = None

    def fits(self, group: WholeGroup) -> bool:
        prompt, passed_s = group.prompt, group.run_time.total_seconds()
        mean = sum(group.rewards) / len(group.rewards)
        oldest = min(sample.min_version for sample in group.samples)
        return (
            (not self.data_sets or prompt.data_set in self.data_sets)
            and all(_label(prompt, name) == value for name, value in self.labels.items())
            and (self.min_reward is None or mean >= self.min_reward)
            and (self.max_reward is None or mean <= self.max_reward)
            and (self.max_staleness is None or group.train_version - oldest <= self.max_staleness)
            and (self.from_s is None or passed_s >= self.from_s)
            and (self.until_s is None or passed_s < self.until_s)
        )


def _label(prompt: Prompt, name: str) -> str | None:
    """Return a label of a prompt, else the field of that name as text."""
    if name in prompt.labels:
        return prompt.labels[name]
    return str(prompt.fields[name]) if name in prompt.fields else None


@dataclass(slots=True, kw_only=True)
class Route(RolloutFilter):
    """Sends groups to the policies that have a rule for them; a policy without rules gets all.

    Example: with `policies: {small: [{data_sets: [easy]}, {max_reward: 0.5}]}` the policy small
    trains on groups of the data set easy, and on others that have a mean reward of at most 0.5.

    Attributes:
        policies: Rules by policy; one of them has to fit. See `Rule` for what one may say.
    """

    policies: Mapping[str, tuple[Mapping[str, Any], ...]]
    rules: dict[str, tuple[Rule, ...]] = field(default_factory=dict[str, Any], init=False)

    def __post_init__(self) -> None:
        self.rules = {
            policy_id: tuple(
                with_options(Rule, rule, where=f"rule {number} of {policy_id}")
                for number, rule in enumerate(rules)
            )
            for policy_id, rules in self.policies.items()
        }

    def keeps(self, group: WholeGroup) -> Sequence[bool]:
        rules = self.rules.get(group.policy_id)
        return [rules is None or any(rule.fits(group) for rule in rules)] * len(group.samples)
