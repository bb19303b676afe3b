"""Route: which policies train on what, by task type, reward, staleness and time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astraflow.core.algorithms.options import with_options
from astraflow.core.algorithms.points import RolloutFilter, WholeGroup
from astraflow.core.tasks import Prompt


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
        """Whether a group is what the rule asks for."""
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
        """Return for each sample whether the policy is one that the group goes to."""
        rules = self.rules.get(group.policy_id)
        return [rules is None or any(rule.fits(group) for rule in rules)] * len(group.samples)
