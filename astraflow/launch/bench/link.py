"""How fast weights come over a link: the same bytes over every lane in turn, from a real origin."""

import resource
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.launch.bench.link_source import POLICY, VERSION, LinkSource
from astraflow.transport.lanes import RECEIVED_NBYTES, Lanes
from astraflow.wire.transfers import TransferPlan, TransferSpec
from astraflow.wire.weights import SentChunk, digest_of

_SPEC = TransferSpec(policy_id=POLICY, version=VERSION)
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRate:
    """What one lane carried.

    Attributes:
        lane: Which.
        first_gb_per_s: Of the first pull, which makes the connections.
        gb_per_s: Median of the pulls after it, over connections that stand.
        best_gb_per_s: Of these.
        cpu_s_per_gb: Of this process, median.
        first_byte_s: From the request to the first chunk, median of the pulls after the first.
    """

    lane: LaneKind
    first_gb_per_s: float
    gb_per_s: float
    best_gb_per_s: float
    cpu_s_per_gb: float
    first_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    nbytes: int
    wall_s: float
    cpu_s: float
    first_byte_s: float


async def measure_link(
    source: LinkSource, lanes: Sequence[LaneKind], *, rounds: int
) -> tuple[LaneRate, ...]:
    """Pull over each lane in turn, once to connect and then `rounds` times.

    Turns meet the same load of the link and the machine. Chunks of the first pull are verified.

    Args:
        source: The other end.
        lanes: Which; those that cannot be had here are left out.
        rounds: At least 1.

    Raises:
        AstraflowError: SOURCE_UNREACHABLE, TOKEN_INVALID and what else the source answers;
            DIGEST_MISMATCH for a chunk that arrived with other bytes; LANE_UNAVAILABLE when no
            lane is left.
    """
    clients = {lane: Lanes(lanes=[lane]) for lane in lanes}
    try:
        first = {lane: await _first_pull(clients[lane], lane, source) for lane in lanes}
        pulls = {lane: [each] for lane, each in first.items() if each is not None}
        for _ in range(rounds):
            for lane, done in pulls.items():
                done.append(await _pull(clients[lane], source, is_verified=False))
    finally:
        for client in clients.values():
            await client.close()
    if not pulls:
        raise AstraflowError(
            Reason.LANE_UNAVAILABLE, f"none of {', '.join(lanes)} reaches {source.endpoint}"
        )
    return tuple(_rate(lane, done) for lane, done in pulls.items())


async def _first_pull(client: Lanes, lane: LaneKind, source: LinkSource) -> _Pull | None:
    """Pull once; None where gRPC took the place of the lane."""
    before = RECEIVED_NBYTES[lane]
    pull = await _pull(client, source, is_verified=True)
    return pull if RECEIVED_NBYTES[lane] - before == pull.nbytes else None


async def _pull(client: Lanes, source: LinkSource, *, is_verified: bool) -> _Pull:
    nbytes, digests, first_byte_s = 0, (), 0.0
    started, cpu_s = time.perf_counter(), _cpu_s()
    async with aclosing(client.pull(source.endpoint, _SPEC, source.token.encode())) as items:
        async for item in items:
            if isinstance(item, TransferPlan):
                digests = item.patches[0].chunk_digests
            elif isinstance(item, SentChunk):
                first_byte_s = first_byte_s or time.perf_counter() - started
                nbytes += len(item.chunk.payload)
                if is_verified:
                    _require_true(item, digests)
    wall_s = time.perf_counter() - started
    return _Pull(nbytes=nbytes, wall_s=wall_s, cpu_s=_cpu_s() - cpu_s, first_byte_s=first_byte_s)


def _require_true(sent: SentChunk, digests: Sequence[bytes]) -> None:
    index = sent.chunk.header.index
    if digest_of(sent.chunk) != digests[index]:
        raise AstraflowError(Reason.DIGEST_MISMATCH, f"chunk {index} arrived with other bytes")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rate(lane: LaneKind, pulls: Sequence[_Pull]) -> LaneRate:
    first, *rest = pulls
    rates = [each.nbytes / each.wall_s / _GB for each in rest]
    return LaneRate(
        lane=lane,
        first_gb_per_s=first.nbytes / first.wall_s / _GB,
        gb_per_s=median(rates),
        best_gb_per_s=max(rates),
        cpu_s_per_gb=median(each.cpu_s * _GB / each.nbytes for each in rest),
        first_byte_s=median(each.first_byte_s for each in rest),
    )
