"""LaneHosts: the lanes of one server, beside its gRPC one."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Final

import structlog

from astraflow.core.clock import Clock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import split_address
from astraflow.rpc.tls import Tls
from astraflow.transport.shm import ShmHost
from astraflow.transport.stream_host import StreamHost
from astraflow.transport.tcp import TcpHost, direct_port
from astraflow.transport.transfers import (
    OpenTransfer,
    Secrets,
    Transfer,
    Transfers,
)
from astraflow.transport.ucx import UcxHost
from astraflow.wire.transfers import LaneEndpoint, TransferPlan

DEFAULT_HOSTED: Final = (LaneKind.SHM, LaneKind.TCP)

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def chosen_lanes(names: Sequence[str]) -> tuple[LaneKind, ...] | None:
    """Return the lanes of a recipe, in its order; `auto`: None."""
    return None if names == "auto" else tuple(map(LaneKind, names))


def is_encrypted(chosen: bool | None, tls: Tls | None) -> bool:
    """Whether lanes that leave the host are encrypted: as a recipe says, else beside TLS."""
    return chosen if chosen is not None else tls is not None and not tls.is_plain


class LaneHosts:
    """Serves transfers over every lane but gRPC, for one event loop."""

    def __init__(self, *, clock: Clock) -> None:
        """Prepare; `start` serves.

        Args:
            clock: For the expiry of transfers.
        """
        self._transfers = Transfers(clock=clock)
        self._endpoints: list[LaneEndpoint] = []
        self._hosts = AsyncExitStack()
        self._stream_hosts: list[StreamHost] = []

    @property
    def connection_count(self) -> int:
        """Connections that stand, or want to, over local sockets and TCP."""
        return sum(each.connection_count for each in self._stream_hosts)

    @property
    def endpoints(self) -> tuple[LaneEndpoint, ...]:
        return tuple(self._endpoints)

    async def start(
        self,
        open_transfer: OpenTransfer,
        *,
        secrets: Secrets,
        listen: str,
        advertised: str,
        lanes: Sequence[LaneKind] = DEFAULT_HOSTED,
        seals: bool = False,
    ) -> None:
        """Serve.

        Args:
            open_transfer: Opens a transfer for pullers whose connections stand.
            secrets: Of the run.
            listen: host:port of the gRPC server; the TCP lane listens on the same interface, on
                the port above its own when that is free.
            advertised: host:port by which others know it.
            lanes: Which ones; a host that has no shared memory serves the others.
            seals: Whether what leaves the host is encrypted.

        Raises:
            AstraflowError: INVALID_FIELD when a lane cannot listen there.
        """
        here = split_address(listen)[0]
        there, port = split_address(advertised)
        claim = self._transfers.claim

        async def started(lane: LaneKind) -> str:
            match lane:
                case LaneKind.TCP:
                    tcp = TcpHost(
                        claim=claim,
                        open_transfer=open_transfer,
                        secrets=secrets,
                        seals=seals,
                    )
                    self._hosts.push_async_callback(tcp.close)
                    self._stream_hosts.append(tcp)
                    return tcp.start(here, there, ports=(direct_port(port), 0))
                case LaneKind.SHM:
                    shm = ShmHost(claim=claim, open_transfer=open_transfer, secrets=secrets)
                    self._hosts.push_async_callback(shm.close)
                    self._stream_hosts.append(shm)
                    return shm.start()
                case LaneKind.UCX:
                    ucx = UcxHost(
                        claim=claim, open_transfer=open_transfer, secrets=secrets, seals=seals
                    )
                    self._hosts.push_async_callback(ucx.close)
                    return await ucx.start(there)
                case _:
                    raise AstraflowError(Reason.LANE_UNAVAILABLE, f"{lane} is not hosted here")

        for lane in lanes:
            try:
                self._endpoints.append(LaneEndpoint(lane=lane, address=await started(lane)))
            except AstraflowError as error:
                if error.reason is not Reason.LANE_UNAVAILABLE:
                    raise
                log.warning("a lane cannot be served here", lane=lane, why=str(error))

    def plan(self, transfer: Transfer, lanes: Sequence[LaneKind]) -> TransferPlan:
        """Keep a transfer for those of the lanes that are served here.

        Raises:
            AstraflowError: LANE_UNAVAILABLE when there is none; the transfer is closed.
        """
        served = [each for lane in lanes for each in self._endpoints if each.lane is lane]
        if not served:
            transfer.close()
            raise AstraflowError(
                Reason.LANE_UNAVAILABLE, "none of these lanes is served here; call Pull"
            )
        return self._transfers.add(transfer, served)

    def renew(self, transfer_id: str) -> datetime:
        return self._transfers.renew(transfer_id)

    def release(self, transfer_id: str) -> None:
        self._transfers.release(transfer_id)

    async def close(self) -> None:
        self._endpoints.clear()
        self._transfers.close()
        await self._hosts.aclose()
