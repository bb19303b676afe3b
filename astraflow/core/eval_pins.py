"""Pins: which versions an evaluation measures, and whether anybody can serve them."""

from collections.abc import Mapping

from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.placement import may_serve_pinned
from astraflow.core.settings import SuiteSettings
from astraflow.core.state import State


def pin(
    state: State, suite: SuiteSettings, versions: Mapping[PolicyId, int]
) -> dict[PolicyId, int]:
    """Return one version for each policy of a suite; one that is left out: its newest.

    Raises:
        AstraflowError: VERSION_UNKNOWN, VERSION_EVICTED, INVALID_FIELD for other policies.
    """
    policy_ids = suite.suite.policy_ids
    pinned: dict[PolicyId, int] = {}
    for policy_id in policy_ids:
        ledger = state.policy(policy_id).versions
        pinned[policy_id] = versions.get(policy_id, max(0, ledger.shown_version))
        ledger.get(pinned[policy_id])
    foreign = set(versions) - set(policy_ids)
    if foreign:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"suite {suite.suite.suite} does not measure {', '.join(sorted(foreign))}",
        )
    return pinned


def may_come(state: State, versions: Mapping[PolicyId, int]) -> bool:
    """Whether a RaaS may still load these versions: they are the newest."""
    return state.newest_versions(tuple(versions)) == dict(versions)


def must_be_servable(state: State, versions: Mapping[PolicyId, int]) -> None:
    """Refuse versions that nobody has and nobody will have.

    Raises:
        AstraflowError: VERSION_NOT_SERVED.
    """
    is_served = any(may_serve_pinned(member, versions) for member in state.sessions.pool)
    if not is_served and not may_come(state, versions):
        failure = not_served(versions)
        raise AstraflowError(failure.reason, failure.message)


def not_served(versions: Mapping[PolicyId, int]) -> Failure:
    """Return why an evaluation cannot go on."""
    names = ", ".join(f"{policy_id} {version}" for policy_id, version in versions.items())
    return Failure(
        reason=Reason.VERSION_NOT_SERVED,
        message=f"no RaaS serves version {names} any more, nor has kept it",
    )
