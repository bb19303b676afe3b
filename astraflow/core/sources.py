"""Sources: who has a version, nearest first, spread so that a region costs the origin one copy.

Receivers of one region that start from the same version form a tree in the order in which they
joined: the first one goes to the origin, number k to number (k - 1) // 4, which passes on each
chunk as it arrives. Only earlier ones are listed, so nobody waits for itself in a circle.

Worked example: eight relays of one region at version 4, version 5 is published. 0 is told
[origin]; 1 to 4 are told [0, ..., origin]; 5 to 7 are told [1, 0, ..., origin]. When 0 dies, 1
goes to the origin, and 2, 3 and 4 to 1. Who holds version 5 already comes before all of these.
When 0 stalls and two say so, it comes last in the tree until it reports something itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from astraflow.core.ids import MemberId, PolicyId
from astraflow.core.sessions import LiveRaas, LiveTrainer, Sessions
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo

FANOUT: Final = 4

_LISTED_RELAYS: Final = 8


def sources_of(
    sessions: Sessions, info: VersionInfo, caller: MemberId | None = None
) -> tuple[SourceInfo, ...]:
    """Return who has a version or is getting it, best first for the caller.

    Near relays that hold it, near relays that pull it, then what is far: the fastest measured
    first, the origin before relays that were not measured. After them who has stalled, then object
    stores. Who has lied is left out; an origin that has is the last resort.

    Args:
        sessions: Who takes part.
        info: Of the version.
        caller: Who asks; None: nobody in particular, who is told of no relay that pulls.
    """
    return _Ranking(sessions, info, caller).sources()


def version_with_sources(
    sessions: Sessions, info: VersionInfo, caller: MemberId | None = None
) -> VersionInfo:
    """Return a version as those who pull it need it."""
    return replace(info, sources=sources_of(sessions, info, caller))


@dataclass(frozen=True, slots=True)
class _Ranking:
    """One answer to one caller."""

    sessions: Sessions
    info: VersionInfo
    caller: MemberId | None

    def sources(self) -> tuple[SourceInfo, ...]:
        live = [self._relay(each, SourceState.LIVE) for each in self._holders()]
        near = [each for each in live if each.region == self._region]
        far = [each for each in live if each.region != self._region]
        origin = self._origin()
        honest = [each for each in origin if not self._is_avoided(each.endpoint)]
        far = sorted([*honest, *far], key=lambda each: -each.goodput_bytes_per_s)
        listed = [*islice([*self._spread(near), *self._pulling()], _LISTED_RELAYS), *far]
        listed.sort(key=lambda each: self._has_stalled(each.endpoint))
        last = [each for each in origin if each not in honest]
        return (*listed, *last, *(s for s in self.info.sources if not self._is_avoided(s.address)))

    @property
    def _policy_id(self) -> PolicyId:
        return self.info.policy_id

    @property
    def _region(self) -> str:
        member = self._member
        return "" if member is None else member.region

    @property
    def _member(self) -> LiveRaas | LiveTrainer | None:
        return None if self.caller is None else self.sessions.find(self.caller)

    def _holders(self) -> list[LiveRaas]:
        return [
            each
            for each in self._others(self.sessions.pool)
            if each.live.get(self._policy_id) == self.info.version
        ]

    def _pulling(self) -> list[SourceInfo]:
        """Return those ahead of the caller in the tree: its parent, the parent's, then the rest."""
        member = self._member
        if not isinstance(member, LiveRaas):
            return []
        tree = self._tree(member)
        place = tree.index(member)
        relays = [each for each in tree[:place] if each.relay_endpoint]
        before: list[LiveRaas] = []
        while place and relays:
            place = (place - 1) // FANOUT % len(relays)
            before.append(relays[place])
        rest = [each for each in relays if each not in before]
        return [self._relay(each, SourceState.PULLING) for each in self._others([*before, *rest])]

    def _tree(self, member: LiveRaas) -> list[LiveRaas]:
        """Return the receivers that start from where a member starts: relays first."""
        base = member.live.get(self._policy_id)
        group = [
            each
            for each in self.sessions.pool
            if each is member
            or (
                self._policy_id in each.policies
                and each.region == member.region
                and each.live.get(self._policy_id) == base
                and each.failed.get(self._policy_id) != self.info.version
            )
        ]
        record = self.sessions.source_record
        return sorted(
            group,
            key=lambda each: (not each.relay_endpoint, record.has_stalled(each.relay_endpoint)),
        )

    def _others(self, members: Iterable[LiveRaas]) -> list[LiveRaas]:
        return [
            each
            for each in members
            if each.relay_endpoint
            and each.member_id != self.caller
            and self.info.version not in each.evicted.get(self._policy_id, ())
            and not self._is_avoided(each.relay_endpoint)
        ]

    def _spread(self, relays: list[SourceInfo]) -> list[SourceInfo]:
        """Begin with another one for every caller."""
        ids = [each.member_id for each in self.sessions]
        if not relays or self.caller is None or self.caller not in ids:
            return relays
        at = ids.index(self.caller) % len(relays)
        return relays[at:] + relays[:at]

    def _relay(self, member: LiveRaas, state: SourceState) -> SourceInfo:
        return SourceInfo(
            kind=SourceKind.RELAY,
            state=state,
            endpoint=member.relay_endpoint,
            member_id=member.member_id,
            region=member.region,
            goodput_bytes_per_s=self._goodput(member.relay_endpoint),
        )

    def _origin(self) -> list[SourceInfo]:
        trainer = self.sessions.trainer_of(self._policy_id)
        if trainer is None:
            return []
        return [
            SourceInfo(
                kind=SourceKind.ORIGIN,
                state=SourceState.LIVE,
                endpoint=served.endpoint,
                member_id=trainer.member_id,
                region=trainer.region,
                shard_rank=served.rank,
                shard_count=len(trainer.weight_endpoints),
                goodput_bytes_per_s=self._goodput(served.endpoint),
            )
            for served in trainer.weight_endpoints
        ]

    def _goodput(self, address: str) -> float:
        return self.sessions.source_record.goodput_bytes_per_s(address, self._region)

    def _has_stalled(self, address: str) -> bool:
        return self.sessions.source_record.has_stalled(address, self.caller)

    def _is_avoided(self, address: str) -> bool:
        return self.sessions.source_record.is_avoided(address, self.caller)
