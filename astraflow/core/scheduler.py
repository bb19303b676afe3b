"""Matching: finds the RaaS for the samples of a group."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from astraflow.core.groups import SampleGroup
from astraflow.core.ids import PolicyId
from astraflow.core.live_members import LiveRaas
from astraflow.core.placement import (
    MemberCapacity,
    PlacementRequest,
    PoolView,
    choose,
    keeps_up,
    training_capacity,
)
from astraflow.core.policies import PolicyState
from astraflow.core.speed import size_of
from astraflow.core.state import State
from astraflow.core.tasks import Prompt, VersionRange


class Scheduler:
    """Looks over the pool for training."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._policy_ids = state.settings.workflow.policy_ids

    def find(
        self,
        prompt: Prompt,
        count: int,
        takers: Sequence[PolicyState],
        versions: Mapping[PolicyId, VersionRange],
        now: datetime,
        *,
        is_suspect: bool = False,
    ) -> MemberCapacity | None:
        """Return where samples of a prompt go; None: they wait.

        Args:
            prompt: What they start from.
            count: Samples.
            takers: Policies that train on them.
            versions: What they may be sampled with.
            now: The time.
            is_suspect: Whether the next member that is lost with it gives the prompt up.
        """
        state, sessions = self._state, self._state.sessions
        newest = state.newest_versions(self._policy_ids)
        if newest is None:
            return None
        minimum = {p: bounds.min or 0 for p, bounds in versions.items()}

        def is_fit(member: LiveRaas) -> bool:
            return (
                not member.is_draining
                and not sessions.is_silent(member, now)
                and keeps_up(member, minimum, newest)
                and not (is_suspect and self._has_suspect(member))
            )

        look = PoolView(
            index=sessions.capacity_index,
            pool=sessions.pool,
            is_fit=is_fit,
            capacity_of=training_capacity,
        )
        latest_s = slack_s(takers, newest, minimum)
        want = self._request(prompt, count, takers, minimum)
        return choose(look, want if latest_s is None else replace(want, latest_s=latest_s))

    def _request(
        self,
        prompt: Prompt,
        count: int,
        policies: Sequence[PolicyState],
        minimum: Mapping[PolicyId, int],
    ) -> PlacementRequest:
        measured = self._state.measured
        return PlacementRequest(
            count=min(count, self._state.settings.rollouts.unit),
            token_count=measured.expected_tokens(size_of(prompt)),
            fastest_token_s=measured.fastest_token_s,
            slack_s=_slacks(policies, minimum),
        )

    def _has_suspect(self, member: LiveRaas) -> bool:
        """Whether a member holds such a prompt: then another one would share its fate."""
        attempts = self._state.settings.rollouts.max_attempts
        return any(is_suspect(each.group, attempts) for each in member.assignments.values())


def _slacks(
    policies: Sequence[PolicyState], minimum: Mapping[PolicyId, int]
) -> Callable[[LiveRaas], float | None]:
    """Return the slack of members; those that serve the same versions have the same."""
    known: dict[tuple[int | None, ...], float | None] = {}

    def slack(member: LiveRaas) -> float | None:
        live = tuple(member.live.get(policy.policy_id) for policy in policies)
        if live not in known:
            known[live] = slack_s(policies, member.live, minimum)
        return known[live]

    return slack


def is_suspect(group: SampleGroup, max_attempts: int) -> bool:
    """Whether one more lost member gives a prompt up.

    Several of them are never at one member: when that is lost, it tells which one did it.
    """
    return 0 < group.loss_count >= max_attempts - 1


def slack_s(
    policies: Iterable[PolicyState], live: Mapping[PolicyId, int], minimum: Mapping[PolicyId, int]
) -> float | None:
    """Return in how many seconds work issued now is too old to who serves versions; None: never.

    It is sampled from what is live there, or from the version that it has to wait for, and is
    trained on at most `max_staleness` versions later, at the pace of the last batches.

    Example:
        The next batch trains on version 8, a batch takes 10 s, max_staleness is 2. Sampled from
        version 7, the last batch for it trains on version 9, in 20 s: that is the slack.
    """
    spans = [_slack_s(policy, live, minimum) for policy in policies]
    return min((span for span in spans if span is not None), default=None)


def _slack_s(
    policy: PolicyState, live: Mapping[PolicyId, int], minimum: Mapping[PolicyId, int]
) -> float | None:
    staleness, cadence_s = policy.settings.max_staleness, policy.window.cadence_s
    steps = policy.settings.steps_per_version
    if not staleness or cadence_s is None or steps is None:
        # Without staleness the trainer waits for all that is open: nothing grows old. Versions that
        # come when they are asked for have no pace.
        return None
    sampled = max(live.get(policy.policy_id, 0), minimum[policy.policy_id])
    return max(0, sampled + staleness + 1 - policy.progress.train_version) * steps * cadence_s
