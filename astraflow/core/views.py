"""Views: the state of a run as its operator sees it."""

from datetime import datetime

from astraflow.core.policies import PolicyState
from astraflow.core.state import State
from astraflow.core.status import PolicyStatus, RolloutPlace, RunState, RunStatus


def run_status(state: State, run_state: RunState, now: datetime) -> RunStatus:
    """Return the whole state."""
    return RunStatus(
        run_id=state.settings.run_id,
        state=run_state,
        policies=tuple(map(policy_status, state.policies.values())),
        members=tuple(state.sessions.status(member, now) for member in state.sessions),
        dead_letter_count=state.dead_letters.count,
        epochs=dict(state.lifecycle.epochs),
        failure=state.lifecycle.failure,
        failures=state.failures.report(),
        start_time=state.start_time,
        server_time=now,
    )


def policy_status(policy: PolicyState) -> PolicyStatus:
    """Return the policy's column of the run's state."""
    newest = policy.versions.newest
    return PolicyStatus(
        policy_id=policy.policy_id,
        version=None if newest is None else newest.version,
        step=policy.progress.step,
        open_group_count=policy.open.count,
        max_open_group_count=policy.open.limit,
        fresh_count=policy.books.count(RolloutPlace.FRESH),
        leased_count=policy.books.count(RolloutPlace.LEASED),
        trained_count=policy.books.count(RolloutPlace.TRAINED),
        replay_count=policy.replay.sample_count,
        drops=policy.books.drops,
        staleness_counts=policy.window.staleness_counts,
        wait_fraction=policy.window.wait_fraction,
        mean_reward=policy.window.mean_reward,
        tokens_per_s=policy.window.tokens_per_s,
        metrics=policy.metrics,
        window=policy.window.span,
        buffer_group_count=policy.fresh_groups,
        buffer_nbytes=policy.buffer_nbytes,
        replay_nbytes=policy.replay.nbytes,
        leased_batch_count=len(policy.lease_table.leases),
    )
