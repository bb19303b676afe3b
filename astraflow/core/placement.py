"""Placement: which RaaS gets a task, and how many samples of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import floor

from astraflow.core.ids import PolicyId
from astraflow.core.sessions import RaasMember


@dataclass(frozen=True, slots=True)
class Room:
    """What one RaaS could take.

    Attributes:
        member: Who.
        free: Samples at once, now.
        most: Samples at once, when it has nothing else.
    """

    member: RaasMember
    free: int
    most: int


def choose(rooms: Iterable[Room], wanted: int) -> Room | None:
    """Return where to place samples; it may be fewer than wanted, see `Room.free`.

    Most free credit first, then the least loaded, then who joined first. Samples stay together
    when some RaaS could ever take all of them; None: wait for it.

    Example:
        8 samples, two RaaS of credit 16 with 5 and 7 free: None. Of credit 4 with 3 and 4
        free: the second, for 4 samples.
    """
    rooms = list(rooms)
    best = max(rooms, key=lambda room: (room.free, -room.member.outstanding), default=None)
    if best is None or best.free == 0:
        return None
    if best.free < wanted <= max(room.most for room in rooms):
        return None
    return best


def training_room(member: RaasMember) -> Room:
    """Return what a RaaS could take of training."""
    return Room(member, member.free_count, member.max_outstanding)


def eval_room(member: RaasMember, share: float) -> Room:
    """Return what a RaaS could take of evaluations that may have a share of its credit."""
    most = member.max_outstanding
    if member.max_eval_outstanding is not None:
        most = min(most, member.max_eval_outstanding)
    most = min(most, max(1, floor(share * member.max_outstanding)))
    free = max(0, min(member.free_count, most - member.eval_outstanding))
    return Room(member, free, most)


def keeps_up(
    member: RaasMember, minimum: Mapping[PolicyId, int], newest: Mapping[PolicyId, int]
) -> bool:
    """Whether work of at least these versions is served soon.

    A RaaS that is one version behind is about to update, unless it just failed to; one that
    is further behind costs only itself.
    """
    for policy_id, wanted in minimum.items():
        live = member.live.get(policy_id)
        if live is None:
            return False
        if live >= min(wanted, newest[policy_id]):
            continue
        if live < wanted - 1 or member.failed.get(policy_id) == newest[policy_id]:
            return False
    return True


def may_serve_pinned(member: RaasMember, versions: Mapping[PolicyId, int]) -> bool:
    """Whether a RaaS serves exactly these versions: live, kept since they were, or to come."""
    for policy_id, version in versions.items():
        live = member.live.get(policy_id)
        if live is None or (policy_id, version) in member.refused:
            return False
        if live > version and (policy_id, version) not in member.pinned:
            return False
        if live < version <= member.failed.get(policy_id, -1):
            return False
    return True
