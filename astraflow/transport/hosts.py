"""LaneHosts: the lanes of one server, beside its gRPC one."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import join_address, split_address
from astraflow.rpc.tls import Tls
from astraflow.transport.groups import Carrier, Transfers
from astraflow.transport.shm import ShmHost
from astraflow.transport.sockets import direct_port, tcp_listener
from astraflow.transport.stream_host import StreamHost
from astraflow.transport.ucx import UcxHost
from astraflow.wire.transfers import LaneEndpoint

_ANY_IPV4: Final = "0.0.0.0"  # noqa: S104 - compared with, not bound to

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

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers
        self.endpoints: list[LaneEndpoint] = []
        self._hosts = AsyncExitStack()

    async def start(
        self,
        *,
        listen: str,
        advertised: str,
        lanes: Sequence[LaneKind] = DEFAULT_HOSTED,
        seals: bool = False,
    ) -> None:
        """Serve.

        Raises:
            AstraflowError: INVALID_FIELD when a lane cannot listen there.
        """
        here = split_address(listen)[0]
        there, port = split_address(advertised)
        if here == _ANY_IPV4 and ":" in there:
            # As gRPC, which takes it for all interfaces of both families.
            here = "::"

        async def started(lane: LaneKind) -> str:
            match lane:
                case LaneKind.TCP:
                    tcp = StreamHost(lane, self.transfers, carrier=Carrier, seals=seals)
                    self._hosts.push_async_callback(tcp.close)
                    listener = tcp_listener(here, (direct_port(port), 0))
                    tcp.listen(listener)
                    return join_address(there, listener.getsockname()[1])
                case LaneKind.SHM:
                    shm = ShmHost(self.transfers)
                    self._hosts.push_async_callback(shm.close)
                    return shm.start()
                case LaneKind.UCX:
                    ucx = UcxHost(self.transfers, seals=seals)
                    self._hosts.push_async_callback(ucx.close)
                    return await ucx.start(there)
                case _:
                    raise AstraflowError(Reason.LANE_UNAVAILABLE, f"{lane} is not hosted here")

        for lane in lanes:
            try:
                self.endpoints.append(LaneEndpoint(lane=lane, address=await started(lane)))
            except AstraflowError as error:
                if error.reason is not Reason.LANE_UNAVAILABLE:
                    raise
                log.warning("a lane cannot be served here", lane=lane, why=str(error))

    async def close(self) -> None:
        self.endpoints.clear()
        await self._hosts.aclose()
