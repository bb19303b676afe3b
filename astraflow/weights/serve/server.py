"""TransferService, and its servers: of a publisher's versions, and of what a node passes on."""

# ruff: noqa: N802 - methods are named by the contract
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from functools import partial
from itertools import count
from typing import Any, Self

from astraflow.client.loop_thread import LoopThread
from astraflow.core.clock import Clock, SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.versions import LaneKind
from astraflow.rpc.auth import TRANSFER_KEY, require_secret
from astraflow.rpc.server import RunningServer, Servicer, start_server
from astraflow.rpc.tls import Tls
from astraflow.transport.grpc_lane import encode_response
from astraflow.transport.hosts import DEFAULT_HOSTED, LaneHosts, is_encrypted
from astraflow.transport.transfers import TRANSFER_TTL, Transfers
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.relay import WeightRelay
from astraflow.weights.serve.transfers import WeightSource, WeightTransfer
from astraflow.wire.fields import set_time
from astraflow.wire.transfers import (
    TransferSpec,
    decode_transfer_spec,
    encode_transfer_plan,
)
from astraflow.wire.weights import LANES, encode_layout, encode_patch_index
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)


class TransferServicer:
    """Serves what sources have, over gRPC and over lanes.

    Attributes:
        lanes: Beside gRPC; none before they are started.
    """

    def __init__(
        self,
        sources: Mapping[PolicyId, WeightSource],
        *,
        transfer_tokens: Callable[[], Sequence[bytes]],
        clock: Clock,
    ) -> None:
        self.lanes = LaneHosts(Transfers(self.open_transfer, transfer_tokens, clock=clock))
        self._sources = sources
        self._transfer_tokens = transfer_tokens
        self._clock = clock
        self._numbers = count(1)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncGenerator[pb.PullResponse]:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        with closing(self._open_whole(decode_transfer_spec(request.spec))) as transfer:
            async with aclosing(transfer.items()) as items:
                async for item in items:
                    yield encode_response(item)

    async def PlanTransfer(
        self, request: pb.PlanTransferRequest, context: Any
    ) -> pb.PlanTransferResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        lanes = [*map(LANES.decode, request.lanes)]
        plan = self.lanes.plan(self._open_whole(decode_transfer_spec(request.spec)), lanes)
        return pb.PlanTransferResponse(plan=encode_transfer_plan(plan))

    async def RenewTransfer(
        self, request: pb.RenewTransferRequest, context: Any
    ) -> pb.RenewTransferResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        response = pb.RenewTransferResponse()
        set_time(response.expire_time, self.lanes.transfers.renew(request.transfer_id))
        return response

    async def ReleaseTransfer(
        self, request: pb.ReleaseTransferRequest, context: Any
    ) -> pb.ReleaseTransferResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        self.lanes.transfers.release(request.transfer_id)
        return pb.ReleaseTransferResponse()

    async def GetPatch(self, request: pb.GetPatchRequest, context: Any) -> pb.GetPatchResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        for source in self._sources.values():
            patch = source.patch(request.root_digest)
            if patch is not None:
                return pb.GetPatchResponse(patch=encode_patch_index(patch.index))
        raise AstraflowError(Reason.PATCH_UNKNOWN, "no patch with this root is kept here")

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        for source in self._sources.values():
            if source.frame is not None and source.frame.digest == request.layout_digest:
                return pb.GetLayoutResponse(layout=encode_layout(source.frame.layout))
        raise AstraflowError(Reason.LAYOUT_UNKNOWN, "no such layout is here")

    def open_transfer(self, spec: TransferSpec) -> WeightTransfer:
        source = self._sources.get(PolicyId(spec.policy_id))
        if source is None:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN,
                f"{', '.join(self._sources)} is served here, not {spec.policy_id}",
            )
        return WeightTransfer(
            source,
            spec,
            transfer_id=f"transfer-{next(self._numbers)}",
            expire_time=self._clock.now() + TRANSFER_TTL,
        )

    def _open_whole(self, spec: TransferSpec) -> WeightTransfer:
        if spec.is_ahead:
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, "over connections that stand alone is anything sent ahead"
            )
        return self.open_transfer(spec)


class TransferServer:
    """Serves sources over gRPC and lanes; until `admit` is called nobody is let in."""

    def __init__(
        self,
        sources: Mapping[PolicyId, WeightSource],
        *,
        lanes: Sequence[LaneKind],
        encrypts: bool | None = None,
    ) -> None:
        self._transfer_tokens: tuple[bytes, ...] = ()
        self._servicer = TransferServicer(
            sources, transfer_tokens=lambda: self._transfer_tokens, clock=SystemClock()
        )
        self._lane_kinds = lanes
        self._encrypts = encrypts
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
        """Start to serve; for what it is given and raises see `rpc.server.start_server`."""
        self._server = await start_server(
            [Servicer(add=add_TransferServiceServicer_to_server, methods=self._servicer)],
            listen=listen,
            advertise=advertise,
            tls=tls,
        )
        await self._servicer.lanes.start(
            listen=listen,
            advertised=self._server.address,
            lanes=self._lane_kinds,
            seals=is_encrypted(self._encrypts, tls),
        )

    async def close(self) -> None:
        """End what is served, after two seconds at most."""
        if self._server is not None:
            await self._server.stop(grace_s=2.0)
            self._server = None
            await self._servicer.lanes.close()


class RelayServer(TransferServer):
    """Serves what the pullers of a node pull, over gRPC and TCP.

    Attributes:
        relays: By policy.
    """

    def __init__(
        self,
        policy_ids: Iterable[PolicyId],
        *,
        lanes: Sequence[LaneKind] | None = None,
        encrypts: bool | None = None,
        wait_s: float = 5.0,
    ) -> None:
        """Relay nothing yet.

        Args:
            policy_ids: Whose versions the node pulls.
            lanes: Of these TCP is served beside gRPC; None: it is.
            encrypts: Whether lanes are encrypted; None: beside TLS.
            wait_s: How long a version may be asked for before its pull begins here.
        """
        self.relays = {policy_id: WeightRelay(wait_s=wait_s) for policy_id in policy_ids}
        chosen = DEFAULT_HOSTED if lanes is None else lanes
        tcp = [lane for lane in chosen if lane is LaneKind.TCP]
        super().__init__(self.relays, lanes=tcp, encrypts=encrypts)


class WeightServer:
    """Serves what a publisher holds, beside a trainer that blocks: from a thread's event loop.

    Until `set_transfer_token` is called nobody is let in.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        *,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        tls: Tls | None = None,
        loop: LoopThread | None = None,
        lanes: Sequence[LaneKind] | None = None,
        encrypts: bool | None = None,
    ) -> None:
        """Listen on nothing; `with` starts it.

        Args:
            publisher: Whose versions are served.
            listen: host:port; port 0 takes a free one.
            advertise: How others dial it: auto, fqdn, a host or IP; None: as listened on.
            tls: None: plain text.
            loop: Shared with a TrainerClient; None: one of its own.
            lanes: Served beside gRPC; None: shared memory and TCP.
            encrypts: Whether lanes that leave the host are encrypted; None: beside TLS.
        """
        self._server = TransferServer(
            {publisher.policy_id: publisher.store},
            lanes=DEFAULT_HOSTED if lanes is None else lanes,
            encrypts=encrypts,
        )
        self._start = partial(self._server.start, listen=listen, advertise=advertise, tls=tls)
        self._owns_loop = loop is None
        self._loop = loop or LoopThread(name="astraflow-weights")

    def __enter__(self) -> Self:
        if self._owns_loop:
            self._loop.start()
        self._loop.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        if self._server.endpoint:
            self._loop.call(self._server.close())
        if self._owns_loop:
            self._loop.close()

    @property
    def endpoint(self) -> str:
        if not self._server.endpoint:
            raise AstraflowError(Reason.NOT_READY, "the weight server has not been started")
        return self._server.endpoint

    def set_transfer_token(self, token: bytes) -> None:
        """Let in who has this secret of the run, or the one before, which some still use."""
        self._server.admit(token)
