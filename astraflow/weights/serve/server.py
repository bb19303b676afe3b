"""TransferService, and a server of it beside a trainer that blocks."""

# ruff: noqa: N802 - methods are named by the contract
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from datetime import timedelta
from itertools import count
from typing import Any, Final, Self

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
from astraflow.weights.publish.publisher import WeightPublisher
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
        self._transfer_tokens = transfer_tokens
        self._clock = clock
        self._lanes = lanes or LaneHosts(clock=clock)
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
        plan = self._lanes.plan(self._open_whole(decode_transfer_spec(request.spec)), lanes)
        return pb.PlanTransferResponse(plan=encode_transfer_plan(plan))

    async def RenewTransfer(
        self, request: pb.RenewTransferRequest, context: Any
    ) -> pb.RenewTransferResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        response = pb.RenewTransferResponse()
        set_time(response.expire_time, self._lanes.renew(request.transfer_id))
        return response

    async def ReleaseTransfer(
        self, request: pb.ReleaseTransferRequest, context: Any
    ) -> pb.ReleaseTransferResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        self._lanes.release(request.transfer_id)
        return pb.ReleaseTransferResponse()

    async def GetPatch(self, request: pb.GetPatchRequest, context: Any) -> pb.GetPatchResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        patch = self._store.patch(request.root_digest)
        return pb.GetPatchResponse(patch=encode_patch_index(patch.index))

    async def GetLayout(self, request: pb.GetLayoutRequest, context: Any) -> pb.GetLayoutResponse:
        require_secret(context, TRANSFER_KEY, *self._transfer_tokens())
        if request.layout_digest != self._store.frame.digest:
            raise AstraflowError(Reason.LAYOUT_UNKNOWN, "another layout is served here")
        return pb.GetLayoutResponse(layout=encode_layout(self._store.frame.layout))

    def open_transfer(self, spec: TransferSpec) -> WeightTransfer:
        """Open a transfer for who has proven that he knows the secret of the run.

        Raises:
            AstraflowError: What `Pull` answers.
        """
        if spec.policy_id != self._policy_id:
            raise AstraflowError(
                Reason.VERSION_UNKNOWN, f"{self._policy_id} is served here, not {spec.policy_id}"
            )
        return WeightTransfer(
            self._store,
            spec,
            transfer_id=f"transfer-{next(self._numbers)}",
            expire_time=self._clock.now() + _TRANSFER_TTL,
        )

    def _open_whole(self, spec: TransferSpec) -> WeightTransfer:
        """Open a transfer over other connections than those that stand."""
        if spec.is_ahead:
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, "over connections that stand alone is anything sent ahead"
            )
        return self.open_transfer(spec)


class WeightServer:
    """Serves what a publisher holds, from an event loop in a thread of its own.

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
        """Prepare; `with` starts it.

        Args:
            publisher: Whose versions are served.
            listen: host:port; port 0 takes a free one.
            advertise: How others dial it: auto, fqdn, a host or IP; None: as listened on.
            tls: None: plain text.
            loop: Shared with a TrainerClient; None: one of its own.
            lanes: Served beside gRPC; None: shared memory and TCP.
            encrypts: Whether the lanes that leave the host are encrypted; None: beside TLS.
        """
        self._publisher = publisher
        self._listen = listen
        self._advertise = advertise
        self._tls = tls
        self._owns_loop = loop is None
        self._loop = loop or LoopThread(name="astraflow-weights")
        self._lanes: LaneHosts | None = None
        self._lane_kinds = DEFAULT_HOSTED if lanes is None else lanes
        self._seals = is_encrypted(encrypts, tls)
        self._server: RunningServer | None = None
        self._transfer_tokens: tuple[bytes, ...] = ()

    def __enter__(self) -> Self:
        """Start to serve.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot listen there.
        """
        if self._owns_loop:
            self._loop.start()
        self._server = self._loop.call(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._loop.call(self._stop(self._server))
            self._server = None
        if self._owns_loop:
            self._loop.close()

    @property
    def endpoint(self) -> str:
        if self._server is None:
            raise AstraflowError(Reason.NOT_READY, "the weight server has not been started")
        return self._server.address

    def set_transfer_token(self, token: bytes) -> None:
        """Let in who has this secret of the run, or the one before, which some still use."""
        self._transfer_tokens = (token, *self._transfer_tokens[:1])

    async def _start(self) -> RunningServer:
        lanes = LaneHosts(clock=SystemClock())
        servicer = TransferServicer(
            self._publisher.policy_id,
            self._publisher.store,
            transfer_tokens=lambda: self._transfer_tokens,
            clock=SystemClock(),
            lanes=lanes,
        )
        server = await start_server(
            [Servicer(add=add_TransferServiceServicer_to_server, methods=servicer)],
            listen=self._listen,
            advertise=self._advertise,
            tls=self._tls,
        )
        self._lanes = lanes
        await lanes.start(
            servicer.open_transfer,
            secrets=lambda: self._transfer_tokens,
            listen=self._listen,
            advertised=server.address,
            lanes=self._lane_kinds,
            seals=self._seals,
        )
        return server

    async def _stop(self, server: RunningServer) -> None:
        await server.stop(grace_s=2.0)
        if self._lanes is not None:
            await self._lanes.close()
