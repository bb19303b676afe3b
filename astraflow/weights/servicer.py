"""TransferService: hands out weights."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from itertools import count
from typing import Any

from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.rpc.auth import TRANSFER_KEY, require_secret
from astraflow.weights.store import PatchStore, StoredPatch
from astraflow.wire.patches import (
    ChunkSet,
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

_TRANSFER_TTL = timedelta(minutes=5)


class TransferServicer:
    """Serves the patches of one store; lanes other than gRPC answer UNIMPLEMENTED."""

    def __init__(
        self,
        policy_id: PolicyId,
        store: PatchStore,
        *,
        transfer_token: Callable[[], bytes],
        clock: Clock,
    ) -> None:
        self._policy_id = policy_id
        self._store = store
        self._transfer_token = transfer_token
        self._clock = clock
        self._numbers = count(1)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncGenerator[pb.PullResponse]:
        """Send the plan, then its chunks."""
        require_secret(context, TRANSFER_KEY, self._transfer_token())
        spec = decode_transfer_spec(request.spec)
        patches = self._patches(spec)
        sent = list(wanted_chunks(patches, spec))
        yield pb.PullResponse(plan=encode_transfer_plan(self._plan(patches, sent)))
        for each in sent:
            yield pb.PullResponse(chunk=encode_sent_chunk(each))

    async def GetPatch(self, request: pb.GetPatchRequest, context: Any) -> pb.GetPatchResponse:
        """Return the index of a patch."""
        require_secret(context, TRANSFER_KEY, self._transfer_token())
        patch = self._store.patch(request.root_digest)
        return pb.GetPatchResponse(patch=encode_patch_index(patch.index))

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        """Return the layout of all versions."""
        require_secret(context, TRANSFER_KEY, self._transfer_token())
        if request.layout_digest != self._store.layout_digest:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "another layout is served here")
        return pb.GetLayoutResponse(layout=encode_layout(self._store.layout))

    def _patches(self, spec: TransferSpec) -> tuple[StoredPatch, ...]:
        if spec.policy_id != self._policy_id:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{self._policy_id} is served here, not {spec.policy_id}"
            )
        if spec.layout_digest and spec.layout_digest != self._store.layout_digest:
            raise AstraflowError(Reason.LAYOUT_MISMATCH, "the puller has another layout")
        patches = self._store.plan(spec.version, spec.base_version)
        nbytes = sum(patch.info.payload_nbytes for patch in patches)
        if 0 < spec.max_memory_nbytes < nbytes:
            raise AstraflowError(
                Reason.MEMORY_EXCEEDED,
                f"the transfer has {nbytes} bytes, the puller takes {spec.max_memory_nbytes}",
            )
        return patches

    def _plan(self, patches: tuple[StoredPatch, ...], sent: list[SentChunk]) -> TransferPlan:
        return TransferPlan(
            transfer_id=f"transfer-{next(self._numbers)}",
            patches=tuple(patch.index for patch in patches),
            chunk_count=len(sent),
            payload_nbytes=sum(len(each.chunk.payload) for each in sent),
            expire_time=self._clock.now() + _TRANSFER_TTL,
        )


def wanted_chunks(patches: tuple[StoredPatch, ...], spec: TransferSpec) -> list[SentChunk]:
    """Return the chunks that a puller wants and does not have, in order."""
    want = {chunks.root_digest: chunks for chunks in spec.want_chunks}
    have = {chunks.root_digest: chunks for chunks in spec.have_chunks}
    nothing = ChunkSet(root_digest=b"", indexes=frozenset({-1}))
    return [
        SentChunk(patch_index=number, chunk=chunk)
        for number, patch in enumerate(patches)
        for index, chunk in enumerate(patch.chunks)
        if (not want or index in want.get(patch.info.root_digest, nothing))
        and index not in have.get(patch.info.root_digest, nothing)
    ]
