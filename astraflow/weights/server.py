"""WeightServer: a TransferService beside a trainer that blocks."""

from collections.abc import Sequence
from typing import Self

from astraflow.client.loop_thread import LoopThread
from astraflow.core.clock import SystemClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import Lane
from astraflow.rpc.server import RunningServer, Servicer, start_server
from astraflow.rpc.tls import Tls
from astraflow.transport.hosts import LaneHosts, hosted_lanes
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.servicer import TransferServicer
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)


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
        lanes: Sequence[Lane] | None = None,
    ) -> None:
        """Prepare; `with` starts it.

        Args:
            publisher: Whose versions are served.
            listen: host:port; port 0 takes a free one.
            advertise: How others dial it: auto, fqdn, a host or IP; None: as listened on.
            tls: None: plain text.
            loop: Shared with a TrainerClient; None: one of its own.
            lanes: Served beside gRPC; None: shared memory and TCP, with TLS shared memory only.
        """
        self._publisher = publisher
        self._listen = listen
        self._advertise = advertise
        self._tls = tls
        self._owns_loop = loop is None
        self._loop = loop or LoopThread(name="astraflow-weights")
        self._lanes: LaneHosts | None = None
        self._lane_kinds = lanes
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
        """Stop to serve; pulls in progress get two seconds."""
        if self._server is not None:
            self._loop.call(self._stop(self._server))
            self._server = None
        if self._owns_loop:
            self._loop.close()

    @property
    def endpoint(self) -> str:
        """host:port, as others dial it."""
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
            lanes=hosted_lanes(self._tls) if self._lane_kinds is None else self._lane_kinds,
            stand_ready=servicer.stand_ready,
        )
        return server

    async def _stop(self, server: RunningServer) -> None:
        await server.stop(grace_s=2.0)
        if self._lanes is not None:
            await self._lanes.close()
