"""Takers: which policies the next group is for."""

from astraflow.core.pacing import blocker_of
from astraflow.core.policies import PolicyState
from astraflow.core.state import State


def live_policies(state: State) -> list[PolicyState]:
    """Return the policies of the training workflow whose data goes on."""
    policies = (state.policies[policy_id] for policy_id in state.settings.workflow.policy_ids)
    return [policy for policy in policies if policy.end is None]


def target_policies(state: State) -> list[PolicyState]:
    """Return the policies that the next group is for; none: it has to wait.

    Groups are for all policies as long as they go on at about one pace. One that is full holds
    the others back until they starve, and not for longer when it is far behind.
    """
    live = live_policies(state)
    roomy = [policy for policy in live if policy.open.has_slot]
    full = [policy for policy in live if not policy.open.has_slot]
    starving = [policy for policy in roomy if policy.open.is_starving]
    if full and not all(_may_miss(state, late, early) for late in full for early in starving):
        return []
    return roomy if not full else starving


def full_policy(state: State) -> PolicyState | None:
    """Return the policy whose open groups keep new ones back; None: none does."""
    return next((policy for policy in live_policies(state) if not policy.open.has_slot), None)


def _may_miss(state: State, full: PolicyState, starving: PolicyState) -> bool:
    """Whether a policy that is full may miss groups that another one needs."""
    is_left = state.sessions.trainer_of(full.policy_id) is None
    if is_left or blocker_of(state, full) is not None:
        return True
    # Batches that may be open: whoever is so far ahead has nothing left that both train on.
    most = (full.settings.max_staleness + 1) * (full.settings.steps_per_version or 1)
    return 1 < most <= starving.progress.consumed_count - full.progress.consumed_count
