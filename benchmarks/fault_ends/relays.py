"""Lying relays: processes that pass on what an honest source sends, a lie in each transfer."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Final

import grpc
import grpc.aio
import zstandard

from astraflow.core.errors import AstraflowError
from astraflow.core.versions import SourceKind
from astraflow.rpc.channel import SERVER_OPTIONS
from astraflow.rpc.server import Servicer, start_server
from astraflow.transport.grpc_lane import GrpcLane
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import (
    add_TransferServiceServicer_to_server,
)
from fault_ends.damage import CLASSES, DAMAGES, Transfer, cut, flipped
from fault_ends.processes import process
from fault_ends.trial import Counts, Receiver, count
from fault_ends.world import World, sources

_VERSIONS_EACH: Final = 5
_AT_ONCE: Final = 10
_LONG: Final = 3600.0

Sent = AsyncGenerator[bytes]


async def lie_to_receivers(*, quota: int, seed: int, scale: int = 4) -> dict[str, Counts]:
    """Let so many relays lie, ten at a time, for five versions each; return the counts."""
    counts = Counts()
    lies = sorted([*CLASSES, *_WAYS])
    for first in range(0, quota, _AT_ONCE):
        names = [lies[each % len(lies)] for each in range(first, min(quota, first + _AT_ONCE))]
        await _some(names, counts, seed=seed + first, scale=scale)
    return {"lying_relay": counts}


async def _some(names: Sequence[str], counts: Counts, *, seed: int, scale: int) -> None:
    world = World(seed=seed, scale=scale)
    add = add_TransferServiceServicer_to_server
    async with await start_server([Servicer(add=add, methods=world.servicer)]) as origin:
        with ExitStack() as stack:
            ends = [
                stack.enter_context(process(serve_lies, origin.address, name, seed + number))[1]
                for number, name in enumerate(names)
            ]
            relays = [await asyncio.to_thread(end.recv) for end in ends]
            receivers = [_receiver(world, number) for number in range(len(relays))]
            await _pull_all(world, (), origin.address, receivers)
            for _ in range(_VERSIONS_EACH):
                outcomes = await _pull_all(world, relays, origin.address, receivers)
                for name, relay, outcome in zip(names, relays, outcomes, strict=True):
                    count(counts, name, outcome, relay)
            for receiver in receivers:
                await receiver.puller.close()


def _receiver(world: World, number: int) -> Receiver:
    """Return a receiver; every second one knows no lane but gRPC."""
    return Receiver(world, GrpcLane() if number % 2 else None, relay_stall_s=0.3)


async def _pull_all(
    world: World, relays: Sequence[str], origin: str, receivers: Sequence[Receiver]
) -> list[Any]:
    info = world.publish()
    honest = sources((origin,))
    told = [
        replace(info, sources=(*sources(relays[at : at + 1], SourceKind.RELAY), *honest))
        for at in range(len(receivers))
    ]
    pulls = [each.pull(one) for each, one in zip(receivers, told, strict=True)]
    return await asyncio.gather(*pulls)


def serve_lies(end: Connection, origin: str, lie: str, seed: int) -> None:
    """Be a relay: tell the address, then lie until killed."""
    asyncio.run(_serve(end, origin, lie, seed))


async def _serve(end: Connection, origin: str, lie: str, seed: int) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_LyingRelay(origin, lie, Random(seed)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    end.send(f"127.0.0.1:{port}")
    await server.wait_for_termination()


class _LyingRelay(grpc.GenericRpcHandler):
    """Passes the bytes of an honest source on; what a lie makes of them goes out as it is."""

    def __init__(self, origin: str, lie: str, rng: Random) -> None:
        self._channel = grpc.aio.insecure_channel(origin, options=SERVER_OPTIONS)
        self._lie = lie
        self._rng = rng
        self._before: list[bytes] = []

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method, on raw bytes; None: the relay has it not."""
        method: str = handler_call_details.method
        secret = tuple(
            each for each in handler_call_details.invocation_metadata if each[0].startswith("astra")
        )

        async def pull(request: bytes, context: Any) -> Sent:
            call = self._channel.unary_stream(method)(request, metadata=secret)
            async for wire in self._spoiled([each async for each in call], context):
                yield wire

        async def layout(request: bytes, context: Any) -> bytes:
            del context
            return flipped(self._rng, await self._channel.unary_unary(method)(request))

        if method.endswith("/Pull"):
            return grpc.unary_stream_rpc_method_handler(pull)
        if method.endswith("/GetLayout"):
            return grpc.unary_unary_rpc_method_handler(layout)
        return None

    async def _spoiled(self, true: list[bytes], context: Any) -> Sent:
        transfer = Transfer(wires=true, other=self._before or true, rng=self._rng)
        self._before = true
        if self._lie in _WAYS:
            async for wire in _WAYS[self._lie](transfer):
                yield wire
            return
        for wire in self._rng.choice(DAMAGES[self._lie])(transfer):
            if isinstance(wire, AstraflowError):
                await context.abort(grpc.StatusCode.UNAVAILABLE, cut().message)
            yield wire


async def die(transfer: Transfer) -> Sent:
    """Be killed between two messages."""
    for wire in transfer.wires[: transfer.any_chunk()]:
        yield wire
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


async def stall(transfer: Transfer) -> Sent:
    """Send some, then nothing."""
    for wire in transfer.wires[: transfer.rng.randrange(len(transfer.wires))]:
        yield wire
    await asyncio.sleep(_LONG)


async def go_on_for_ever(transfer: Transfer) -> Sent:
    """Send one true chunk without end."""
    yield transfer.wires[0]
    while True:
        yield transfer.wires[1]


async def serve_the_version_before(transfer: Transfer) -> Sent:
    """Send what the last one who asked was sent."""
    for wire in transfer.other:
        yield wire


async def babble(transfer: Transfer) -> Sent:
    """Send bytes that mean nothing."""
    for wire in transfer.wires:
        yield transfer.rng.randbytes(len(wire))


async def bomb(transfer: Transfer) -> Sent:
    """Send a small frame that unpacks to 64 MiB in the place of each payload."""
    yield transfer.wires[0]
    payload = zstandard.compress(bytes(64 << 20), 1)
    for at in range(1, len(transfer.wires)):
        message = transfer.read(at)
        message.chunk.payload = payload
        message.chunk.header.payload_nbytes = len(payload)
        yield message.SerializeToString()


async def flood(transfer: Transfer) -> Sent:
    """Send a message that is larger than any may be."""
    yield transfer.wires[0]
    yield bytes(66 << 20)


async def say_nothing(transfer: Transfer) -> Sent:
    """End without a word."""
    del transfer
    for wire in ():
        yield wire


_WAYS: Final[dict[str, Callable[[Transfer], Sent]]] = {
    each.__name__: each
    for each in (
        die,
        stall,
        go_on_for_ever,
        serve_the_version_before,
        babble,
        bomb,
        flood,
        say_nothing,
    )
}
