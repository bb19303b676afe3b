"""A TCP relay that can be pulled out: what a network does to a connection."""

import asyncio
from contextlib import suppress
from typing import Self

# Pieces of up to 64 KiB between the two ends of one direction.
_MOST_ON_THE_WAY = 1024
_GOODBYE_S = 1.0


class Relay:
    """Passes bytes between those who dial it and one address.

    Attributes:
        delay_s: Seconds that bytes are on their way, in each direction.
    """

    def __init__(self, target: str) -> None:
        """Name who is dialled, host:port."""
        self._host, _, self._port = target.rpartition(":")
        self._server: asyncio.Server | None = None
        self._is_plugged = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close what is open."""
        if self._server is not None:
            self._server.close()
        self.unplug()
        if self._passing:
            await asyncio.wait(self._passing, timeout=_GOODBYE_S)

    @property
    def address(self) -> str:
        """Dial this."""
        if self._server is None:
            raise RuntimeError("start the relay first: async with Relay(...)")
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Break every connection, with whatever is on its way; new ones are welcome."""
        for writer in self._writers:
            writer.transport.abort()

    def unplug(self) -> None:
        """Break every connection, and new ones until `plug`."""
        self._is_plugged = False
        self.cut()

    def plug(self) -> None:
        """Let connections in again."""
        self._is_plugged = True

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passing = asyncio.create_task(self._pass_on(reader, writer))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_plugged:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.close()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        self._writers -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop, due = asyncio.get_running_loop(), 0.0
        way = asyncio.Queue[tuple[float, bytes]](_MOST_ON_THE_WAY)
        arriving = asyncio.create_task(_arrive(way, writer))
        try:
            while data := await reader.read(1 << 16):
                due = max(due, loop.time() + self.delay_s)
                await way.put((due, data))
            await way.put((due, b""))
            await arriving
        except OSError:
            pass  # The connection was cut, which is what it is for.
        finally:
            arriving.cancel()
            writer.close()


async def _arrive(way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """Write what is on its way when it is due; empty data is the end."""
    loop = asyncio.get_running_loop()
    while True:
        due, data = await way.get()
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        if not data:
            return
        writer.write(data)
        with suppress(OSError):
            await writer.drain()
