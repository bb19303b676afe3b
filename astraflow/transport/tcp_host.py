"""Serves the TCP lane."""

import socket
from collections.abc import Sequence
from contextlib import suppress

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address
from astraflow.transport.groups import InlineCarrier
from astraflow.transport.sockets import kept
from astraflow.transport.stream_host import ClaimTransfer, StreamHost
from astraflow.transport.transfers import OpenStanding, OpenTransfer, Secrets


class TcpHost(StreamHost):
    """Serves framed chunks over TCP."""

    def __init__(
        self,
        *,
        claim: ClaimTransfer,
        open_transfer: OpenTransfer,
        secrets: Secrets,
        stand_ready: OpenStanding | None = None,
    ) -> None:
        super().__init__(
            claim=claim,
            open_transfer=open_transfer,
            secrets=secrets,
            carrier=InlineCarrier,
            stand_ready=stand_ready,
        )

    def start(self, host: str, advertised_host: str, *, ports: Sequence[int] = (0,)) -> str:
        """Listen; return host:port, as others dial it.

        Args:
            host: Whose interface is listened on.
            advertised_host: By which others know it.
            ports: The first one that is free is taken; 0: any.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot listen there.
        """
        *others, last = ports
        for port in others:
            with suppress(AstraflowError):
                return self._listen_on(host, advertised_host, port)
        return self._listen_on(host, advertised_host, last)

    def _listen_on(self, host: str, advertised_host: str, port: int) -> str:
        try:
            listener = _bound(host, port)
        except OSError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the TCP lane cannot listen on {join_address(host, port)}: {error.strerror}",
            ) from error
        self.listen(listener)
        return join_address(advertised_host, listener.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with kept(socket.socket(family, kind, protocol)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    return listener
