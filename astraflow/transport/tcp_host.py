"""Serves the TCP lane."""

import socket

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.address import join_address
from astraflow.transport.groups import InlineCarrier
from astraflow.transport.stream_host import ClaimTransfer, StreamHost
from astraflow.transport.transfers import OpenTransfer


class TcpHost(StreamHost):
    """Serves framed chunks over TCP."""

    def __init__(self, *, claim: ClaimTransfer, open_transfer: OpenTransfer) -> None:
        super().__init__(claim=claim, open_transfer=open_transfer, carrier=InlineCarrier)

    def start(self, host: str, advertised_host: str, *, port: int = 0) -> str:
        """Listen; return host:port, as others dial it.

        Args:
            host: Whose interface is listened on.
            advertised_host: By which others know it.
            port: 0: a free one.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot listen there.
        """
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except OSError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the TCP lane cannot listen on {join_address(host, port)}: {error.strerror}",
            ) from error
        self.listen(listener)
        return join_address(advertised_host, listener.getsockname()[1])
