"""Sources: who has a version, nearest first, spread so that a region costs the origin one copy.

Receivers of one region that start from the same version form a tree in the order in which they
joined: the first one goes to the origin, number k to number (k - 1) // 4, which passes on each
chunk as it arrives. Only earlier ones are listed, so nobody waits for itself in a circle.

Worked example: eight relays of one region at version 4, version 5 is published. 0 is told
[origin]; 1 to 4 are told [0, ..., origin]; 5 to 7 are told [1, 0, ..., origin]. When 0 dies, 1
goes to the origin, and 2, 3 and 4 to 1. Who holds version 5 already comes before all of these.
When 0 stalls and two say so, it comes last in the tree until it reports something itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import chain, islice
from typing import Final

from astraflow.core.ids import MemberId
from astraflow.core.pool.live_members import LiveRaas, LiveTrainer, place_of
from astraflow.core.pool.sessions import Sessions
from astraflow.core.versions import SourceInfo, SourceKind, SourceState, VersionInfo

FANOUT: Final = 4

_LISTED_RELAYS: Final = 8


def sources_of(
    sessions: Sessions, info: VersionInfo, caller: MemberId | None = None
) -> tuple[SourceInfo, ...]:
    """Return who has a version or is getting it, best first for the caller.

    Near relays that hold it, near relays that pull it, then what is far: the fastest measured
    first, the origin before relays that were not measured. After them who has stalled, then object
    stores. Who has lied is left out; an origin that has is the last resort. At most eight relays
    are listed: what a pool of any size costs per caller is the same, but for a search among those
    who start from the same version.

    Args:
        sessions: Who takes part.
        info: Of the version.
        caller: Who asks; None: nobody in particular, who is told of no relay that pulls.
    """
    member = None if caller is None else sessions.members.get(caller)
    region = "" if member is None else member.region
    return _Ranking(sessions, info, caller, member, region).sources()


def version_with_sources(
    sessions: Sessions, info: VersionInfo, caller: MemberId | None = None
) -> VersionInfo:
    return replace(info, sources=sources_of(sessions, info, caller))


@dataclass(frozen=True, slots=True)
class _Ranking:
    """One answer to one caller."""

    sessions: Sessions
    info: VersionInfo
    caller: MemberId | None
    member: LiveRaas | LiveTrainer | None
    region: str

    def sources(self) -> tuple[SourceInfo, ...]:
        holders = (self._relay(each, SourceState.LIVE) for each in self._others(self._holders()))
        above = (self._relay(each, SourceState.PULLING) for each in self._others(self._ancestors()))
        near = list(islice(chain(holders, above), _LISTED_RELAYS))
        origin, record = self._origin(), self.sessions.source_record
        honest = [each for each in origin if not record.is_avoided(each.endpoint, self.caller)]
        far = [*honest, *self._far(_LISTED_RELAYS - len(near))]
        far.sort(key=lambda each: -each.goodput_bytes_per_s)
        listed = [*near, *far]
        listed.sort(key=lambda each: record.has_stalled(each.endpoint, self.caller))
        last = [each for each in origin if each not in honest]
        stores = (s for s in self.info.sources if not record.is_avoided(s.address, self.caller))
        return (*listed, *last, *stores)

    def _holders(self) -> Iterator[LiveRaas]:
        """Yield the relays of the region that hold it, beginning with another for every caller."""
        relays = self._group(self.info.version, self.region)
        member = self.member
        at = member.number % len(relays) if relays and isinstance(member, LiveRaas) else 0
        yield from islice(relays, at, None)
        yield from islice(relays, at)

    def _far(self, count: int) -> list[SourceInfo]:
        """Return the relays of other regions that hold it, the fastest measured ones."""
        version, record = self.info.version, self.sessions.source_record
        regions = self.sessions.version_index.regions(self.info.policy_id, version)
        far = [region for region in regions if region != self.region]
        if not far or not count:
            return []
        relays = (each for region in far for each in self._group(version, region))
        fastest = nlargest(
            count,
            self._others(relays),
            key=lambda each: (
                record.goodput_bytes_per_s(each.relay_endpoint, self.region),
                -each.number,
            ),
        )
        return [self._relay(each, SourceState.LIVE) for each in fastest]

    def _ancestors(self) -> Iterator[LiveRaas]:
        """Yield those ahead of the caller in the tree: its parent, the parent's, then the rest."""
        member = self.member
        if not isinstance(member, LiveRaas):
            return
        relays, place = self._tree(member)
        count = min(place, len(relays))
        before: list[LiveRaas] = []
        while place and count:
            place = (place - 1) // FANOUT % count
            before.append(relays[place])
        yield from before
        yield from (each for each in islice(relays, count) if each not in before)

    def _tree(self, member: LiveRaas) -> tuple[Sequence[LiveRaas], int]:
        """Return the relays that start from where a member starts, and its place in their tree.

        Who has stalled comes last of them, and those who are no relays behind them.
        """
        base, version = member.live.get(self.info.policy_id), self.info.version
        relays = self._group(base, member.region, but_failed=version)
        stalled = self.sessions.source_record.stalled
        if stalled:
            relays = sorted(relays, key=lambda each: each.relay_endpoint in stalled)
        if not member.relay_endpoint:
            others = self._group(base, member.region, but_failed=version, is_relay=False)
            return relays, len(relays) + place_of(member, others)
        if not stalled:
            return relays, place_of(member, relays)
        is_stalled = member.relay_endpoint in stalled
        before = (
            each
            for each in relays
            if ((each.relay_endpoint in stalled), each.number) < (is_stalled, member.number)
        )
        return relays, sum(1 for _ in before)

    def _group(
        self,
        version: int | None,
        region: str,
        *,
        but_failed: int | None = None,
        is_relay: bool = True,
    ) -> Sequence[LiveRaas]:
        return self.sessions.version_index.group(
            self.info.policy_id, version, region, is_relay=is_relay, but_failed=but_failed
        )

    def _others(self, members: Iterable[LiveRaas]) -> Iterator[LiveRaas]:
        """Leave out the caller, and whom it should not ask."""
        record, info = self.sessions.source_record, self.info
        for each in members:
            if (
                each.member_id != self.caller
                and info.version not in each.evicted.get(info.policy_id, ())
                and not record.is_avoided(each.relay_endpoint, self.caller)
            ):
                yield each

    def _relay(self, member: LiveRaas, state: SourceState) -> SourceInfo:
        record = self.sessions.source_record
        return SourceInfo(
            kind=SourceKind.RELAY,
            state=state,
            endpoint=member.relay_endpoint,
            member_id=member.member_id,
            region=member.region,
            goodput_bytes_per_s=record.goodput_bytes_per_s(member.relay_endpoint, self.region),
        )

    def _origin(self) -> list[SourceInfo]:
        record = self.sessions.source_record
        trainer = self.sessions.trainers.get(self.info.policy_id)
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
                goodput_bytes_per_s=record.goodput_bytes_per_s(served.endpoint, self.region),
            )
            for served in trainer.weight_endpoints
        ]
