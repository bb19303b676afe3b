"""Loading: a run whose pool cannot load the first weights of a policy says so and ends."""

from datetime import datetime

from astraflow.core.errors import Failure, Reason
from astraflow.core.live_members import LiveRaas
from astraflow.core.policies import PolicyState
from astraflow.core.state import State


class Loading:
    """Watches for policies that nobody can serve.

    Once some RaaS has served a policy, later versions that fail are the nodes' own matter: they
    go on with what they have, and try again.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._failing_since: datetime | None = None
        self._served: set[str] = set()

    @property
    def next_deadline(self) -> datetime | None:
        """When the run fails, unless somebody loads the weights."""
        if self._failing_since is None or self._state.lifecycle.is_final:
            return None
        return self._failing_since + self._state.settings.first_version_grace

    def advance(self, now: datetime) -> None:
        """Fail the run when all of the pool has failed to load a policy for too long."""
        if len(self._served) == len(self._state.policies):
            return
        failing = [p for p in self._state.policies.values() if self._is_failing(p)]
        if not failing:
            self._failing_since = None
            return
        self._failing_since = self._failing_since or now
        if now - self._failing_since >= self._state.settings.first_version_grace:
            self._fail(failing[0])

    def _is_failing(self, policy: PolicyState) -> bool:
        """Whether somebody tried to load a policy, nobody has it, and everybody failed."""
        if policy.policy_id in self._served or policy.end is not None:
            return False
        pool = [m for m in self._state.sessions.pool if policy.policy_id in m.policies]
        if any(policy.policy_id in member.live for member in pool):
            self._served.add(policy.policy_id)
            return False
        return bool(pool) and all(_has_failed(member, policy) for member in pool)

    def _fail(self, policy: PolicyState) -> None:
        flow, cause = self._state.lifecycle, policy.load_failure
        flow.failure = flow.failure or Failure(
            reason=cause.reason if cause else Reason.VERSION_NOT_SERVED,
            message=f"no RaaS could load version {policy.versions.shown_version} of "
            f"{policy.policy_id}: {cause.message if cause else 'they did not say why'}",
            metadata=cause.metadata if cause else {},
        )


def _has_failed(member: LiveRaas, policy: PolicyState) -> bool:
    failed = member.failed.get(policy.policy_id)
    return failed is not None and failed >= policy.versions.shown_version
