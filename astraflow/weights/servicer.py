"""TransferService: hands out weights."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Final

from astraflow.codec.chunks import ChunkHeader
from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import CodecProfile
from astraflow.rpc.auth import TRANSFER_KEY, require_secret
from astraflow.weights.store import PatchStore, StoredPatch
from astraflow.wire.patches import (
    SentChunk,
    TransferPlan,
    TransferSpec,
    decode_transfer_spec,
    encode_patch_index,
    encode_sent_chunk,
    encode_transfer_plan,
)
from astraflow.wire.weights import encode_layout
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb

_TRANSFER_TTL: Final = timedelta(minutes=5)

ChunkPlace = tuple[int, int]
"""Number of the patch in the plan, index of the chunk."""


class TransferServicer:
    """Serves the patches of one store; lanes other than gRPC answer UNIMPLEMENTED."""

    def __init__(
        self,
        policy_id: PolicyId,
        store: PatchStore,
        *,
        transfer_tokens: Callable[[], Sequence[bytes]],
        clock: Clock,
    ) -> None:
        self._policy_id = policy_id
        self._store = store
        self._transfer_tokens = transfer_tokens
        self._clock = clock
        self._numbers = count(1)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncGenerator[pb.PullResponse]:
        """Send the plan, then its chunks."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        plan, places = self._plan(decode_transfer_spec(request.spec))
        infos = [index.patch for index in plan.patches]
        with self._store.reading(infos):
            yield pb.PullResponse(plan=encode_transfer_plan(plan))
            for number, index in places:
                chunk = self._store.chunk(infos[number], index)
                sent = SentChunk(patch_index=number, chunk=chunk)
                yield pb.PullResponse(chunk=encode_sent_chunk(sent))

    async def GetPatch(self, request: pb.GetPatchRequest, context: Any) -> pb.GetPatchResponse:
        """Return the index of a patch."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        patch = self._store.patch(request.root_digest)
        return pb.GetPatchResponse(patch=encode_patch_index(patch.index))

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        """Return the layout of all versions."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        if request.layout_digest != self._store.frame.digest:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "another layout is served here")
        return pb.GetLayoutResponse(layout=encode_layout(self._store.frame.layout))

    def _plan(self, spec: TransferSpec) -> tuple[TransferPlan, list[ChunkPlace]]:
        self._require_ours(spec)
        have = {chunks.root_digest: chunks for chunks in spec.have_chunks}
        patches = self._store.plan(spec.version, spec.base_version, have)
        places = wanted_chunks(patches, spec)
        nbytes = sum(len(patches[number].chunks[index].payload) for number, index in places)
        if 0 < spec.max_memory_nbytes < nbytes:
            raise AstraflowError(
                Reason.MEMORY_EXCEEDED,
                f"the transfer has {nbytes} bytes, the puller takes {spec.max_memory_nbytes}",
            )
        plan = TransferPlan(
            transfer_id=f"transfer-{next(self._numbers)}",
            patches=tuple(patch.index for patch in patches),
            chunk_count=len(places),
            payload_nbytes=nbytes,
            expire_time=self._clock.now() + _TRANSFER_TTL,
        )
        return plan, places

    def _require_ours(self, spec: TransferSpec) -> None:
        if spec.policy_id != self._policy_id:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{self._policy_id} is served here, not {spec.policy_id}"
            )
        if spec.layout_digest and spec.layout_digest != self._store.frame.digest:
            raise AstraflowError(Reason.LAYOUT_MISMATCH, "the puller has another layout")
        if spec.profiles and CodecProfile.FAST not in spec.profiles:
            raise AstraflowError(
                Reason.PATCH_UNKNOWN, f"patches are {CodecProfile.FAST} here, and nothing else"
            )


def wanted_chunks(patches: Sequence[StoredPatch], spec: TransferSpec) -> list[ChunkPlace]:
    """Return the chunks that a puller wants and does not have, in order."""
    want = {chunks.root_digest: chunks for chunks in spec.want_chunks}
    have = {chunks.root_digest: chunks for chunks in spec.have_chunks}
    return [
        (number, index)
        for number, patch in enumerate(patches)
        for index, chunk in enumerate(patch.chunks)
        if (not want or index in want.get(patch.root, ()))
        and index not in have.get(patch.root, ())
        and _touches(chunk.header, spec.ranges)
    ]


def _touches(header: ChunkHeader, ranges: Sequence[range]) -> bool:
    return not ranges or any(
        each.start < header.end and header.offset < each.stop for each in ranges
    )
