"""Payloads: arrays of trajectories in the run's payload store, written by nodes, read by trainers.

A payload is written, whole, before the rollout that names it is sent. Who reads one compares its
digest, which went through the run, before anything is made of it.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import uuid4

import structlog
from blake3 import blake3

from astraflow.core.batches import BatchPart, RowSource
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import RolloutId
from astraflow.core.packing import recut
from astraflow.core.rollouts import (
    REWARDED,
    Outcome,
    Payload,
    PayloadColumn,
    PayloadStore,
    Rollout,
    Trajectory,
)
from astraflow.core.tensors import Dtype
from astraflow.rpc.concurrency import Retry
from astraflow.storage.buckets import Bucket
from astraflow.wire.rollout import read_arrays, write_arrays

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MARKER: Final = "payloads.txt"
"""What a hub writes into the store, so that members know that they see the same one."""

# The run keeps no others.
_KEPT: Final = REWARDED | {Outcome.SCORER_FAILED}
# A request to a bucket takes 20 to 100 ms: so many run at once.
_AT_ONCE: Final = 16
_LOST_IDS: Final = "rollout_ids"


class PayloadWriter:
    """Puts the arrays of large trajectories into the store."""

    def __init__(self, store: PayloadStore, *, patience_s: float = 30.0) -> None:
        """Open the store."""
        self._above_nbytes = store.above_nbytes
        self._bucket = Bucket(store.url)
        self._patience_s = patience_s
        self._writing = set[asyncio.Future[Trajectory]]()

    async def check(self) -> None:
        """See whether this is the store that the hub sees."""
        await asyncio.to_thread(_must_be_seen, self._bucket)

    async def put(self, rollout: Rollout) -> Rollout:
        """Return a rollout whose large trajectories lie in the store, safely.

        Raises:
            AstraflowError: SOURCE_UNREACHABLE; what was written of it is removed by the run in
                time.
        """
        if rollout.outcome not in _KEPT or not any(map(self._is_large, rollout.trajectories)):
            return rollout
        retry = Retry(self._patience_s)
        trajectories = [
            await self._put(each, retry) if self._is_large(each) else each
            for each in rollout.trajectories
        ]
        return replace(rollout, trajectories=tuple(trajectories))

    def _is_large(self, trajectory: Trajectory) -> bool:
        arrays = (trajectory.tokens, trajectory.sampled_mask, trajectory.logprobs)
        own = (column.values for column in trajectory.columns.values())
        return sum(each.nbytes for each in (*arrays, *own)) >= self._above_nbytes

    async def _put(self, trajectory: Trajectory, retry: Retry) -> Trajectory:
        while True:
            writing = asyncio.ensure_future(asyncio.to_thread(self._write, trajectory))
            self._writing.add(writing)
            writing.add_done_callback(self._written)
            try:
                written = await asyncio.shield(writing)
            except AstraflowError as error:
                await retry.pause(error)
            else:
                retry.reset()
                return written

    def _written(self, writing: "asyncio.Future[Trajectory]") -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            # Of one that nobody waits for any more, too.
            writing.exception()

    async def close(self) -> None:
        """Wait for what is written, of episodes that were stopped as well."""
        if self._writing:
            await asyncio.wait(self._writing)

    def _write(self, trajectory: Trajectory) -> Trajectory:
        content = write_arrays(trajectory)
        payload = Payload(
            name=uuid4().hex,
            digest=blake3(content).digest(),
            nbytes=len(content),
            token_count=trajectory.token_count,
            columns=tuple(
                PayloadColumn(
                    name=name,
                    axis=column.axis,
                    dtype=Dtype.of(column.values.dtype),
                    shape=column.values.shape[1:],
                )
                for name, column in trajectory.columns.items()
            ),
        )
        self._bucket.write(payload.name, content, is_synced=True)
        return replace(trajectory, payload=payload)


class PayloadReader:
    """Fetches what of a batch lies in the store."""

    def __init__(self, *, patience_s: float = 30.0) -> None:
        self._patience_s = patience_s
        self._buckets: dict[str, Bucket] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def parts(
        self, url: str, parts: Sequence[BatchPart], *, max_tokens: int
    ) -> list[BatchPart]:
        """Return the parts of a rank's share with all arrays, cut as without a store.

        Raises:
            AstraflowError: PAYLOAD_LOST, which `lost_rollout_ids` tells the rollouts of;
                SOURCE_UNREACHABLE, CAPABILITY_MISSING.
        """
        if url not in self._buckets:
            self._buckets[url] = Bucket(url)
        bucket, retry = self._buckets[url], Retry(self._patience_s)
        rows = [
            self._fetch(bucket, retry, source, rollout_id)
            for part in parts
            for source, rollout_id in zip(part.sources, part.rollout_ids, strict=True)
        ]
        found = await asyncio.gather(*rows)
        lost = [each for each in found if isinstance(each, AstraflowError)]
        if lost:
            raise await self._lost(bucket, lost)
        sources = iter([each for each in found if isinstance(each, RowSource)])
        whole = [
            replace(part, sources=tuple(next(sources) for _ in part.sources)) for part in parts
        ]
        return recut(whole, max_tokens)

    async def _lost(self, bucket: Bucket, lost: Sequence[AstraflowError]) -> AstraflowError:
        """Say all of what is lost at once, unless the store is another one than the hub's."""
        await asyncio.to_thread(_must_be_seen, bucket)
        ids = [error.metadata[_LOST_IDS] for error in lost]
        return AstraflowError(
            Reason.PAYLOAD_LOST,
            f"{len(ids)} rollouts of the batch cannot be read, the first: {lost[0].message}; the "
            "batch returns to the run without them; see that nobody but the hub removes or changes "
            f"what is in {bucket.url}",
            metadata={_LOST_IDS: "\n".join(dict.fromkeys(ids))},
        )

    async def _fetch(
        self, bucket: Bucket, retry: Retry, source: RowSource, rollout_id: RolloutId
    ) -> RowSource | AstraflowError:
        payload = source.trajectory.payload
        if payload is None:
            return source
        async with self._places:
            while True:
                try:
                    made = await asyncio.to_thread(read_payload, bucket, source.trajectory, payload)
                except AstraflowError as error:
                    if error.reason is Reason.PAYLOAD_LOST:
                        error.metadata[_LOST_IDS] = rollout_id
                        return error
                    await retry.pause(error)
                else:
                    retry.reset()
                    return replace(source, trajectory=made)


def read_payload(bucket: Bucket, trajectory: Trajectory, payload: Payload) -> Trajectory:
    """Return a trajectory with the arrays of its payload; blocks.

    Raises:
        AstraflowError: PAYLOAD_LOST when it is missing, or not what its digest says;
            SOURCE_UNREACHABLE.
    """
    try:
        content = read_content(bucket, payload.name, payload.digest, payload.nbytes)
        return replace(trajectory, payload=None, **read_arrays(content))
    except AstraflowError as error:
        if error.reason is Reason.SOURCE_UNREACHABLE:
            raise
        raise AstraflowError(
            Reason.PAYLOAD_LOST, f"trajectory {trajectory.trajectory_id}: {error.message}"
        ) from error


def read_content(bucket: Bucket, name: str, digest: bytes, nbytes: int) -> bytes:
    """Return an object of the store; blocks."""
    try:
        content = bucket.read(name, 0, nbytes + 1)
    except FileNotFoundError:
        raise AstraflowError(Reason.PAYLOAD_LOST, f"{bucket.url}/{name} is missing") from None
    if len(content) != nbytes or blake3(content).digest() != digest:
        raise AstraflowError(
            Reason.PAYLOAD_LOST, f"{bucket.url}/{name} is not what its digest says"
        )
    return content


def lost_rollout_ids(error: AstraflowError) -> tuple[RolloutId, ...]:
    """Return the rollouts that PAYLOAD_LOST is about; none for any other error."""
    if error.reason is not Reason.PAYLOAD_LOST:
        return ()
    return tuple(map(RolloutId, error.metadata.get(_LOST_IDS, "").split("\n")))


def _must_be_seen(bucket: Bucket) -> None:
    """Refuse a store that is not the hub's, such as a local folder where a mount is missing."""
    try:
        bucket.read(MARKER)
    except FileNotFoundError:
        raise AstraflowError(
            Reason.SOURCE_UNREACHABLE,
            f"{bucket.url} is not the payload store that the hub of the run sees: mount it here "
            "under the same path, or take a url for rollouts.payloads that all hosts reach",
        ) from None
