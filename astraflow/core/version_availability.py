"""Reach: what can still be had of a policy that has no trainer.

A version that was announced and pulled by nobody is lost with its trainer until that is back. Work
that is for several policies and asks for it would wait as long, whoever else trains on it.

Example:
    Solver and verifier train on the same groups. The verifier's trainer announces version 5 and
    dies; node A samples with version 4 and has no other source. A task that asks for 5 or newer
    waits. Once the verifier is given up, it is withdrawn, and issued again for 4 or newer.
"""

from astraflow.core.groups import Assignment
from astraflow.core.policies import PolicyState
from astraflow.core.sources import sources_of
from astraflow.core.state import State


def newest_available(state: State, policy: PolicyState) -> int:
    """Return the newest version that all of the pool sample with or can pull; -1: none."""
    for info in reversed(policy.versions.listed):
        if sources_of(state.sessions, info):
            return info.version
    return min(
        (member.live.get(policy.policy_id, -1) for member in state.sessions.pool), default=-1
    )


def is_missed(state: State, policy: PolicyState) -> bool:
    """Whether work that others train on waits for a version that nobody can have."""
    if policy.versions.newest is None or state.sessions.trainer_of(policy.policy_id) is not None:
        return False
    if not _has_partner(state, policy):
        return False
    reach = newest_available(state, policy)
    return policy.open.min_version(is_open=True) > reach or any(
        waits_in_vain(state, policy, assignment, reach) for assignment in state.assignments.values()
    )


def waits_in_vain(
    state: State, policy: PolicyState, assignment: Assignment, available: int
) -> bool:
    """Whether a training task asks for a version that its holder cannot have."""
    bounds = assignment.task.versions.get(policy.policy_id)
    if bounds is None or bounds.min is None or assignment.is_eval or assignment.is_withdrawn:
        return False
    live = state.sessions.raas(assignment.member_id).live.get(policy.policy_id, -1)
    return bounds.min > max(live, available)


def _has_partner(state: State, policy: PolicyState) -> bool:
    others = (other for other in state.policies.values() if other is not policy)
    return any(
        other.end is None and state.sessions.trainer_of(other.policy_id) is not None
        for other in others
    )
