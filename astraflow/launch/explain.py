"""Why a run waits, in words: every link says what is waited for, and what that waits for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from astraflow.client.control import ControlClient
from astraflow.config.run_dir import RunDir
from astraflow.core.ids import PolicyId
from astraflow.core.status import RunStatus, WaitReason

Waits = Mapping[PolicyId, Sequence[WaitReason]]


async def show_waits(run_dir: RunDir, *, as_json: bool) -> str:
    """Return what every trainer of a run waits for.

    Raises:
        AstraflowError: NOT_READY when no hub of this run can be reached.
    """
    endpoint = run_dir.read_endpoint()
    async with ControlClient(endpoint.address, token=endpoint.operator_token) as control:
        status = await control.get_run()
        waits = {
            policy.policy_id: await control.ledger.explain_wait(policy.policy_id)
            for policy in status.policies
        }
    return waits_to_json(status, waits) if as_json else "\n".join(lines_of(status, waits))


def lines_of(status: RunStatus, waits: Waits) -> Iterator[str]:
    """Yield the waits as a tree: a link whose waiter was the subject before stands below it."""
    yield f"{status.run_id} is {status.state}"
    for policy_id, links in waits.items():
        yield f"{policy_id} {'waits' if links else 'waits for nothing'}"
        depths = {str(policy_id): 0}
        for link in links:
            depth = depths.get(link.waiter_id, 0) + 1
            if link.subject_id:
                depths.setdefault(link.subject_id, depth)
            yield f"{'   ' * (depth - 1)}└─ {link.message}{_times(link, status.server_time)}"


def waits_to_json(status: RunStatus, waits: Waits) -> str:
    """Return the waits for machines: the links of each policy, in order."""
    policies = {policy: [asdict(link) for link in links] for policy, links in waits.items()}
    told = {"run_id": status.run_id, "state": status.state, "policies": policies}
    return json.dumps(told, default=_plain)


def _times(link: WaitReason, now: datetime) -> str:
    """Return since when, and when the run acts by itself."""
    parts: list[str] = []
    if link.since_time is not None:
        parts.append(f"for {_seconds(now, link.since_time)}")
    if link.resolve_time is not None:
        parts.append(f"given up in {_seconds(link.resolve_time, now)}")
    return f" ({', '.join(parts)})" if parts else ""


def _seconds(late: datetime, early: datetime) -> str:
    return f"{max(0.0, (late - early).total_seconds()):.1f} s"


def _plain(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)
