"""A connection that sends its request head too slowly is closed: it holds a place for nobody."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time by which a head that was begun must be whole."""

    def __init__(self, *args: Any, head_timeout_s: float, **kwargs: Any) -> None:
        """Prepare.

        Args:
            args: Of uvicorn.
            head_timeout_s: From the first byte, or the connection, to the end of the head.
            kwargs: Of uvicorn.
        """
        super().__init__(*args, **kwargs)
        self._head_timeout_s = head_timeout_s
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count with the connection."""
        super().connection_made(transport)
        self._count()

    def data_received(self, data: bytes) -> None:
        """Count while a head is not whole."""
        super().data_received(data)
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop()
        else:
            self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop to count."""
        self._stop()
        super().connection_lost(exc)

    def _count(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._head_timeout_s, self._give_up)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        """Say why, and close."""
        self._late = None
        if self.transport.is_closing():
            return
        why = f"no request head came in {self._head_timeout_s:g} s"
        body = json.dumps({"error": why}).encode()
        head = (
            "HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
