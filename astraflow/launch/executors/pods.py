"""What Kubernetes says of Jobs and pods, and how manifests are put together."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, cast

from astraflow.launch.executors.base import LOST, code_of_shell

CONTAINER: Final = "astraflow"
"""Name of that with the process, beside which pods may have others."""

# A machine that says nothing for so long after its pod should have been gone is lost.
_OVERDUE: Final = timedelta(seconds=60)


def merged(ours: Any, more: Any) -> Any:
    """Return a part of a manifest with more of it: what is said twice is as in `more`.

    Example:
        Of containers [{name: a, image: b}] and [{name: a, tty: true}, {name: c}] come
        [{name: a, image: b, tty: true}, {name: c}].
    """
    if isinstance(ours, Mapping) and isinstance(more, Mapping):
        old, new = cast("Mapping[str, Any]", ours), cast("Mapping[str, Any]", more)
        return {**old, **{k: merged(old[k], v) if k in old else v for k, v in new.items()}}
    if not isinstance(ours, list) or not isinstance(more, list):
        return more
    items: list[Any] = [*ours]
    for each in cast("list[Any]", more):
        same = [i for i, item in enumerate(items) if _key(each) and _key(item) == _key(each)]
        if same:
            items[same[0]] = merged(items[same[0]], each)
        else:
            items.append(each)
    return items


def _key(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return None
    said = cast("Mapping[str, Any]", item)
    return said.get("mountPath") or said.get("name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What kubectl says of a pod.

    Attributes:
        name: Its own.
        job: Of the Job that made it.
        has_begun: Whether there is a log.
        is_evicted: Whether somebody takes its place from it.
        exit_code: None while it is not over.
        trouble: Why it waits or was ended; empty: nothing to tell.
    """

    name: str
    job: str
    has_begun: bool
    is_evicted: bool
    exit_code: int | None
    trouble: str

    @classmethod
    def of(cls, said: Mapping[str, Any], *, now: datetime) -> "Pod":
        """Return a pod; one that lost its place counts as killed, whatever it ended with."""
        meta, status = said["metadata"], said.get("status", {})
        states = {each["name"]: each["state"] for each in status.get("containerStatuses", ())}
        state = states.get(CONTAINER, {})
        conditions = {each["type"]: each for each in status.get("conditions", ())}
        target = conditions.get("DisruptionTarget", {}).get("status") == "True"
        gone_by, phase = meta.get("deletionTimestamp"), status.get("phase")
        is_evicted = target or gone_by is not None
        ended = state.get("terminated")
        code = None
        if ended is not None:
            code = LOST if is_evicted else code_of_shell(ended["exitCode"])
        elif phase == "Failed" or (gone_by and datetime.fromisoformat(gone_by) + _OVERDUE < now):
            code = LOST
        return cls(
            name=meta["name"],
            job=meta.get("labels", {}).get("job-name", ""),
            has_begun=ended is not None or "running" in state,
            is_evicted=is_evicted,
            exit_code=code,
            trouble=_trouble(status, state, conditions.get("PodScheduled", {})),
        )


def _trouble(
    status: Mapping[str, Any], state: Mapping[str, Any], scheduled: Mapping[str, Any]
) -> str:
    """Return why a pod waits or was ended where that is not as it should be."""
    usual = ("ContainerCreating", "PodInitializing", "Completed", "Error")
    for said in (status, state.get("waiting", {}), state.get("terminated", {})):
        if said.get("reason", usual[0]) not in usual:
            return f"{said['reason']} {said.get('message', '')}".strip()[:300]
    return str(scheduled.get("message", ""))[:300] if scheduled.get("status") == "False" else ""


def end_of(job: Mapping[str, Any] | None, pods: Sequence[Pod], *, count: int) -> int | None:
    """Return the exit code of a process of so many pods; None while it is not over.

    Args:
        job: None: there is none any more.
        pods: Of that Job.
        count: How many it has to have.
    """
    # One that had to go because another failed says less.
    failed = [pod for pod in sorted(pods, key=lambda pod: pod.is_evicted) if pod.exit_code]
    if failed:
        return failed[0].exit_code
    if sum(pod.exit_code == 0 for pod in pods) == count:
        return 0
    conditions: Sequence[Any] = (job or {}).get("status", {}).get("conditions", ())
    ends = [each for each in conditions if each["type"] in ("Complete", "Failed")]
    is_over = job is None or any(each["status"] == "True" for each in ends)
    # Pods that are not there any more were evicted.
    return LOST if is_over and all(pod.exit_code is not None for pod in pods) else None


def slug(name: str) -> str:
    """Return a name as Kubernetes has them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:30].strip("-")
