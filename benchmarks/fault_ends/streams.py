"""Stream faults: the bytes of a TCP lane are damaged by a proxy that knows no frames."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Final

from astraflow.core.versions import LaneKind
from astraflow.rpc.server import RunningServer, Servicer, start_server
from astraflow.transport.lanes import Lanes
from astraflow.weights.serve.server import TransferServer
from astraflow.wire.transfers import LaneEndpoint
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)
from fault_ends.damage import flipped
from fault_ends.trial import Counts, Receiver, count
from fault_ends.world import POLICY, TOKEN, World, sources

# Patches of some 100 KB, so that a lane has several connections.
_SCALE: Final = 700
_STALL_S: Final = 0.3
# Of versions; most of them bring an injection.
_MOST_BARREN: Final = 200

Spoil = Callable[[Random, bytes], bytes | None]
"""Returns other bytes than came; None: the connection is cut."""


def flip(rng: Random, data: bytes) -> bytes:
    """Flip one bit."""
    return flipped(rng, data)


def flip_first(rng: Random, data: bytes) -> bytes:
    """Flip one bit of the first 64 bytes, where a header may lie."""
    return flipped(rng, data[:64]) + data[64:]


def overwrite(rng: Random, data: bytes) -> bytes:
    """Overwrite some bytes."""
    at, size = rng.randrange(len(data)), rng.randrange(1, 200)
    return data[:at] + rng.randbytes(len(data[at : at + size])) + data[at + size :]


def drop(rng: Random, data: bytes) -> bytes:
    """Lose some bytes."""
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randrange(1, 200) :]


def insert(rng: Random, data: bytes) -> bytes:
    """Put bytes between others."""
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randrange(1, 200)) + data[at:]


def repeat(rng: Random, data: bytes) -> bytes:
    """Bring some bytes twice."""
    at = rng.randrange(len(data))
    return data[: at + rng.randrange(1, 2000)] + data[at:]


def swap(rng: Random, data: bytes) -> bytes:
    """Bring the second part first."""
    at = rng.randrange(len(data))
    return data[at:] + data[:at]


def cut(rng: Random, data: bytes) -> None:
    """Cut the connection."""
    del rng, data


def swallow(rng: Random, data: bytes) -> bytes:
    """Bring nothing."""
    del rng, data
    return b""


_SPOILS: Final[tuple[Spoil, ...]] = (
    *(flip, flip_first, overwrite, drop, insert, repeat, swap, cut, swallow),
)


class SpoilingProxy:
    """Passes bytes on between pullers and a lane, and spoils what comes from the lane once.

    Attributes:
        address: Dial this.
        is_hit: Whether bytes were spoiled since `arm`.
    """

    def __init__(self, target: str, rng: Random) -> None:
        self.address = ""
        self.is_hit = False
        self._host, _, self._port = target.rpartition(":")
        self._rng = rng
        self._spoil: Spoil | None = None
        self._reads_left = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def arm(self, spoil: Spoil | None, *, after: int) -> None:
        """Spoil what comes after so many reads."""
        self._spoil, self._reads_left, self.is_hit = spoil, after, False

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def stop(self) -> None:
        """Close what is open."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        await asyncio.gather(
            _pump(reader, far_writer, lambda data: data),
            _pump(far_reader, writer, self._passed),
        )

    def _passed(self, data: bytes) -> bytes | None:
        self._reads_left -= 1
        if self._spoil is None or self._reads_left >= 0:
            return data
        spoil, self._spoil, self.is_hit = self._spoil, None, True
        return spoil(self._rng, data)


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    passed: Callable[[bytes], bytes | None],
) -> None:
    try:
        while data := await reader.read(1 << 14):
            out = passed(data)
            if out is None:
                break
            writer.write(out)
            await writer.drain()
    except OSError:
        pass  # The other end is gone, which is what it is for.
    finally:
        writer.transport.abort()


async def damage_streams(*, quota: int, seed: int) -> dict[str, Counts]:
    """Spoil so many transfers over a TCP lane; return the counts.

    Raises:
        RuntimeError: The lane is not used any more.
    """
    counts, rng, barren_count = Counts(), Random(seed), 0
    world = World(seed=seed, scale=_SCALE)
    async with _ends(world, rng) as (spoiled, proxy, honest):
        receiver = _receiver(world)
        while counts.injected < quota:
            info = replace(world.publish(), sources=sources((spoiled, honest)))
            is_calm = receiver.puller.version is None or rng.random() < 0.2
            spoil = rng.choice(_SPOILS)
            # The first reads have what both ends prove to each other, the next ones weights.
            proxy.arm(None if is_calm else spoil, after=rng.choice([0, 1, 4, 8, 9, 12]))
            outcome = await receiver.pull(info)
            barren_count = 0 if proxy.is_hit else barren_count + 1
            if barren_count == _MOST_BARREN:
                raise RuntimeError(f"{barren_count} versions in a row did not come by the lane")
            if proxy.is_hit:
                count(counts, spoil.__name__, outcome, spoiled)
            is_plain = not is_calm and not proxy.is_hit
            if outcome.corruption or is_plain:
                # After a silent lane it keeps to gRPC for a while.
                await receiver.puller.close()
                receiver = _receiver(world)
        await receiver.puller.close()
    return {"spoiled_stream": counts}


def _receiver(world: World) -> Receiver:
    return Receiver(world, Lanes(lanes=[LaneKind.TCP], stall_timeout_s=_STALL_S))


@asynccontextmanager
async def _ends(world: World, rng: Random) -> AsyncGenerator[tuple[str, SpoilingProxy, str]]:
    """Yield a source whose TCP lane is spoiled, what spoils it, and a source without lanes."""
    servicer = TransferServer({POLICY: world.publisher.store})
    servicer.set_transfer_token(TOKEN)
    hosts = servicer.hosts
    async with await _served(servicer) as server, await _served(world.servicer) as honest:
        await hosts.start(
            listen="127.0.0.1:0",
            advertised=server.address,
            lanes=[LaneKind.TCP],
        )
        proxy = SpoilingProxy(hosts.endpoints[0].address, rng)
        await proxy.start()
        # Who is told where the lane is comes through the proxy.
        hosts.endpoints[:] = [LaneEndpoint(lane=LaneKind.TCP, address=proxy.address)]
        yield server.address, proxy, honest.address
        await proxy.stop()
        await hosts.close()


async def _served(servicer: TransferServer) -> RunningServer:
    return await start_server(
        [Servicer(add=add_TransferServiceServicer_to_server, methods=servicer)]
    )
