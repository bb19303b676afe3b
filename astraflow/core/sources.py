"""Sources: who has a version, from who serves and who reported what."""

from dataclasses import replace

from astraflow.core.sessions import Sessions
from astraflow.core.versions import Source, SourceKind, SourceState, VersionInfo


def sources_of(sessions: Sessions, info: VersionInfo) -> tuple[Source, ...]:
    """Return who has a version, best first: relays that hold it live, the origin, object stores."""
    relays = tuple(
        Source(
            kind=SourceKind.RELAY,
            state=SourceState.LIVE,
            endpoint=member.relay_endpoint,
            member_id=member.member_id,
            region=member.region,
        )
        for member in sessions.pool
        if member.relay_endpoint and member.live.get(info.policy_id) == info.version
    )
    trainer = sessions.trainer_of(info.policy_id)
    endpoints = () if trainer is None else trainer.weight_endpoints
    origin = tuple(
        Source(
            kind=SourceKind.ORIGIN,
            state=SourceState.LIVE,
            endpoint=served.endpoint,
            member_id=trainer.member_id if trainer else None,
            region=trainer.region if trainer else "",
            shard_rank=served.rank,
            shard_count=len(endpoints),
        )
        for served in endpoints
    )
    return relays + origin + info.sources


def version_with_sources(sessions: Sessions, info: VersionInfo) -> VersionInfo:
    """Return a version as those who pull it need it."""
    return replace(info, sources=sources_of(sessions, info))
