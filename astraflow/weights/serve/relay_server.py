"""RelayServer: the TransferService of a RaaS, for all its policies."""

# ruff: noqa: N802 - methods are named by the contract

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from astraflow.core.clock import SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import LaneKind
from astraflow.rpc.server import RunningServer, Servicer, start_server
from astraflow.rpc.tls import Tls
from astraflow.transport.hosts import DEFAULT_HOSTED, LaneHosts, is_encrypted
from astraflow.weights.serve.relay import WeightRelay
from astraflow.weights.serve.server import TransferServicer
from astraflow.weights.serve.transfers import WeightTransfer
from astraflow.wire.transfers import TransferSpec
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)


class RelayServer:
    """Serves what the pullers of a node pull; until `admit` is called nobody is let in."""

    def __init__(
        self,
        policy_ids: Iterable[PolicyId],
        *,
        lanes: Sequence[LaneKind] | None = None,
        encrypts: bool | None = None,
        wait_s: float = 5.0,
    ) -> None:
        """Prepare.

        Args:
            policy_ids: Whose versions the node pulls.
            lanes: Of these TCP is served beside gRPC; None: it is.
            encrypts: Whether it is encrypted; None: beside TLS.
            wait_s: How long a version may be asked for before its pull begins here.
        """
        self.relays = {policy_id: WeightRelay(wait_s=wait_s) for policy_id in policy_ids}
        self._transfer_tokens: tuple[bytes, ...] = ()
        self._lane_kinds = DEFAULT_HOSTED if lanes is None else lanes
        self._encrypts = encrypts
        self._lanes = LaneHosts(clock=SystemClock())
        self._server: RunningServer | None = None

    @property
    def endpoint(self) -> str:
        """host:port, as others dial it; empty: not started."""
        return "" if self._server is None else self._server.address

    def admit(self, token: bytes) -> None:
        """Let in who has this secret of the run, or the one before, which some still use."""
        if token not in self._transfer_tokens[:1]:
            self._transfer_tokens = (token, *self._transfer_tokens[:1])

    async def start(
        self, *, listen: str = "127.0.0.1:0", advertise: str | None = None, tls: Tls | None = None
    ) -> None:
        """Start to serve.

        Args:
            listen: host:port; port 0 takes a free one.
            advertise: How others dial it: auto, fqdn, a host or IP; None: as listened on.
            tls: None: plain text.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot listen there.
        """
        servicer = _Switch({each: self._servicer(each) for each in self.relays})
        self._server = await start_server(
            [Servicer(add=add_TransferServiceServicer_to_server, methods=servicer)],
            listen=listen,
            advertise=advertise,
            tls=tls,
        )
        await self._lanes.start(
            servicer.open_transfer,
            secrets=lambda: self._transfer_tokens,
            listen=listen,
            advertised=self._server.address,
            lanes=[lane for lane in self._lane_kinds if lane is LaneKind.TCP],
            seals=is_encrypted(self._encrypts, tls),
        )

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace_s=1.0)
            self._server = None
            await self._lanes.close()

    def _servicer(self, policy_id: PolicyId) -> TransferServicer:
        return TransferServicer(
            policy_id,
            self.relays[policy_id],
            transfer_tokens=lambda: self._transfer_tokens,
            clock=SystemClock(),
            lanes=self._lanes,
        )


class _Switch:
    """Hands each call to the servicer of its policy."""

    def __init__(self, servicers: dict[PolicyId, TransferServicer]) -> None:
        self._servicers = servicers

    def open_transfer(self, spec: TransferSpec) -> WeightTransfer:
        return self._of(spec.policy_id).open_transfer(spec)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncGenerator[pb.PullResponse]:
        servicer = self._of(request.spec.policy_id)
        async with aclosing(servicer.Pull(request, context)) as responses:
            async for response in responses:
                yield response

    async def PlanTransfer(
        self, request: pb.PlanTransferRequest, context: Any
    ) -> pb.PlanTransferResponse:
        return await self._of(request.spec.policy_id).PlanTransfer(request, context)

    async def RenewTransfer(
        self, request: pb.RenewTransferRequest, context: Any
    ) -> pb.RenewTransferResponse:
        return await self._any.RenewTransfer(request, context)

    async def ReleaseTransfer(
        self, request: pb.ReleaseTransferRequest, context: Any
    ) -> pb.ReleaseTransferResponse:
        return await self._any.ReleaseTransfer(request, context)

    async def GetPatch(self, request: pb.GetPatchRequest, context: Any) -> pb.GetPatchResponse:
        for servicer in self._servicers.values():
            try:
                return await servicer.GetPatch(request, context)
            except AstraflowError as error:
                if error.reason is not Reason.PATCH_UNKNOWN:
                    raise
        raise AstraflowError(Reason.PATCH_UNKNOWN, "no patch with this root is here")

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        for servicer in self._servicers.values():
            try:
                return await servicer.GetLayout(request, context)
            except AstraflowError as error:
                if error.reason is not Reason.LAYOUT_UNKNOWN:
                    raise
        raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no such layout has been pulled here")

    @property
    def _any(self) -> TransferServicer:
        return next(iter(self._servicers.values()))

    def _of(self, policy_id: str) -> TransferServicer:
        servicer = self._servicers.get(PolicyId(policy_id))
        if servicer is None:
            raise AstraflowError(Reason.VERSION_UNKNOWN, f"{policy_id} is not relayed here")
        return servicer
