"""TransferService: hands out weights."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from datetime import timedelta
from itertools import count
from typing import Any, Final

from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.rpc.auth import TRANSFER_KEY, require_secret
from astraflow.transport.hosts import LaneHosts
from astraflow.weights.ahead import AheadTransfer
from astraflow.weights.arriving import ArrivingTransfer
from astraflow.weights.served import (
    Arriving,
    ChunkPlace,
    PlannedPatch,
    ServedTransfer,
    WeightSource,
    link_of,
    wanted_chunks,
)
from astraflow.weights.signs import with_signs
from astraflow.weights.store import PatchStore
from astraflow.wire.fields import set_time
from astraflow.wire.patches import encode_patch_index, encode_sent_chunk
from astraflow.wire.transfers import (
    TransferPlan,
    TransferSpec,
    Waiting,
    decode_transfer_spec,
    encode_transfer_plan,
)
from astraflow.wire.weights import LANES, encode_layout
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb

_TRANSFER_TTL: Final = timedelta(minutes=5)


class TransferServicer:
    """Serves the patches of one store, over gRPC and over the lanes that it is given."""

    def __init__(
        self,
        policy_id: PolicyId,
        store: WeightSource,
        *,
        transfer_tokens: Callable[[], Sequence[bytes]],
        clock: Clock,
        lanes: LaneHosts | None = None,
    ) -> None:
        """Serve a store.

        Args:
            policy_id: Whose versions they are.
            store: What is served.
            transfer_tokens: Returns the run's current secret, and the one before.
            clock: For the expiry of plans.
            lanes: None: gRPC only.
        """
        self._policy_id = policy_id
        self._store = store
        self._arriving_store = store if isinstance(store, Arriving) else None
        self._transfer_tokens = transfer_tokens
        self._clock = clock
        self._lanes = lanes or LaneHosts(clock=clock)
        self._numbers = count(1)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncGenerator[pb.PullResponse]:
        """Send the plan, then its chunks."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        async with aclosing(self._responses(decode_transfer_spec(request.spec))) as responses:
            if self._arriving_store is None:
                async for response in responses:
                    yield response
                return
            async with aclosing(with_signs(responses)) as signed:
                async for each in signed:
                    is_sign = isinstance(each, Waiting)
                    yield pb.PullResponse(waiting=pb.Waiting()) if is_sign else each

    async def PlanTransfer(
        self, request: pb.PlanTransferRequest, context: Any
    ) -> pb.PlanTransferResponse:
        """Open a transfer for other lanes."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        lanes = [*map(LANES.decode, request.lanes)]
        spec = decode_transfer_spec(request.spec)
        plan = self._lanes.plan(self._arriving(spec) or self.open_transfer(spec), lanes)
        return pb.PlanTransferResponse(plan=encode_transfer_plan(plan))

    async def RenewTransfer(
        self, request: pb.RenewTransferRequest, context: Any
    ) -> pb.RenewTransferResponse:
        """Move the expiry of a transfer on."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        response = pb.RenewTransferResponse()
        set_time(response.expire_time, self._lanes.renew(request.transfer_id))
        return response

    async def ReleaseTransfer(
        self, request: pb.ReleaseTransferRequest, context: Any
    ) -> pb.ReleaseTransferResponse:
        """End a transfer that no lane has claimed."""
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        self._lanes.release(request.transfer_id)
        return pb.ReleaseTransferResponse()

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

    def open_transfer(self, spec: TransferSpec) -> ServedTransfer:
        """Open a transfer for who has proven that he knows the secret of the run.

        Raises:
            AstraflowError: What `Pull` answers.
        """
        return ServedTransfer(self._store, *self._plan(spec), arriving=self._arriving_store)

    def stand_ready(self, spec: TransferSpec) -> AheadTransfer | ArrivingTransfer | None:
        """Open a transfer of what is still to come for who has proven that he knows the secret.

        Returns:
            None: all of it is here, `open_transfer` is for that.

        Raises:
            AstraflowError: LANE_UNAVAILABLE where versions are not made; see AheadTransfer.
        """
        if not spec.is_ahead:
            return self._arriving(spec)
        if not isinstance(self._store, PatchStore):
            raise _not_ahead()
        self._require_ours(spec)
        return AheadTransfer(
            self._store, spec, plan_for=self._plan_for, open_published=self.open_transfer
        )

    def _arriving(self, spec: TransferSpec) -> ArrivingTransfer | None:
        if self._arriving_store is None:
            return None
        return ArrivingTransfer(self._arriving_store, spec, self.open_transfer)

    async def _responses(self, spec: TransferSpec) -> AsyncGenerator[pb.PullResponse]:
        transfer = await self._expect(spec)
        with closing(transfer):
            yield pb.PullResponse(plan=encode_transfer_plan(transfer.plan))
            async with aclosing(transfer.chunks()) as chunks:
                async for sent in chunks:
                    yield pb.PullResponse(chunk=encode_sent_chunk(sent))

    async def _expect(self, spec: TransferSpec) -> ServedTransfer:
        """Open a transfer, once it is known whether there can be one."""
        if self._arriving_store is not None:
            await self._arriving_store.expect(spec)
        return self.open_transfer(spec)

    def _plan(self, spec: TransferSpec) -> tuple[TransferPlan, list[ChunkPlace]]:
        if spec.is_ahead:
            raise _not_ahead()
        self._require_ours(spec)
        have = {chunks.root_digest: chunks for chunks in spec.have_chunks}
        patches = self._store.plan(spec.version, spec.base_version, have, link=link_of(spec))
        places = wanted_chunks(patches, spec)
        plan = self._plan_for(patches, places)
        if 0 < spec.max_memory_nbytes < plan.payload_nbytes:
            raise AstraflowError(
                Reason.MEMORY_EXCEEDED,
                f"the transfer has {plan.payload_nbytes} bytes, the puller takes"
                f" {spec.max_memory_nbytes}",
            )
        return plan, places

    def _plan_for(
        self, patches: Sequence[PlannedPatch], places: Sequence[ChunkPlace]
    ) -> TransferPlan:
        nbytes = sum(
            patch.payload_nbytes([index for at, index in places if at == number])
            for number, patch in enumerate(patches)
        )
        return TransferPlan(
            transfer_id=f"transfer-{next(self._numbers)}",
            patches=tuple(patch.index for patch in patches),
            chunk_count=len(places),
            payload_nbytes=nbytes,
            expire_time=self._clock.now() + _TRANSFER_TTL,
        )

    def _require_ours(self, spec: TransferSpec) -> None:
        if spec.policy_id != self._policy_id:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{self._policy_id} is served here, not {spec.policy_id}"
            )
        if spec.layout_digest and spec.layout_digest != self._store.frame.digest:
            raise AstraflowError(Reason.LAYOUT_MISMATCH, "the puller has another layout")


def _not_ahead() -> AstraflowError:
    return AstraflowError(
        Reason.LANE_UNAVAILABLE,
        "versions are sent ahead by trainers alone, over TCP; ask for one that there is",
    )
