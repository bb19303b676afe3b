"""One member's line to a hub, with a switch for everything that can go wrong on it."""

import asyncio
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, cast

import grpc
import grpc.aio

from astraflow.core.errors import AstraflowError
from astraflow.rpc.channel import dial
from astraflow.rpc.server import Servicer, start_server

# Pieces of up to 64 KiB between the two ends of one direction.
_MOST_ON_THE_WAY = 1024
_GOODBYE_S = 1.0


class TcpRelay:
    """Passes bytes between those who dial it and one address.

    Attributes:
        delay_s: Seconds that bytes are on their way, in each direction.
    """

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        # A server of asyncio loses, open, what it accepts in the moment of its close.
        self._listener: socket.socket | None = None
        self._is_plugged = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._passing: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        self.unplug()
        if self._passing:
            await asyncio.wait(self._passing, timeout=_GOODBYE_S)

    @property
    def address(self) -> str:
        if self._listener is None:
            raise RuntimeError("start the relay first: async with Relay(...)")
        host, port = self._listener.getsockname()
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
        self._is_plugged = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return  # The caller left before.
        accepted.setblocking(False)
        passing = asyncio.create_task(self._pass_on(accepted))
        self._passing.add(passing)
        passing.add_done_callback(self._passing.discard)

    async def _pass_on(self, accepted: socket.socket) -> None:
        async with AsyncExitStack() as ends:
            near = await self._open(ends, sock=accepted)
            with suppress(OSError):
                far = await self._open(ends, host=self._host, port=int(self._port))
                await asyncio.gather(self._pump(near[0], far[1]), self._pump(far[0], near[1]))
                for _, writer in near, far:
                    await writer.wait_closed()

    async def _open(
        self, ends: AsyncExitStack, **where: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open one end of a connection: a cut reaches it until nothing of it is left."""
        reader, writer = await asyncio.open_connection(**where)
        ends.callback(writer.transport.abort)
        ends.callback(self._writers.discard, writer)
        self._writers.add(writer)
        if not self._is_plugged:
            writer.transport.abort()
        return reader, writer

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


KEEP_ALIVE = "KeepAlive"

# Set by the channel itself.
_OWN_KEYS = ("grpc-", "user-agent")


class Line:
    """Passes every call on to a hub, unless a test says otherwise.

    Methods are named without their service, such as `StreamTasks`.

    Attributes:
        calls: How many of each method came in.

    Example:
        async with Line(run.address) as line:
            line.refuse("AckBatch", times=2)
            with TrainerClient(hub=line.address, ...) as client:
    """

    def __init__(self, hub: str) -> None:
        self.calls = Counter[str]()
        self._hub = hub
        self._refusals = defaultdict[str, list[AstraflowError | grpc.StatusCode]](list)
        self._gates: dict[str, asyncio.Event] = {}
        self._delays: dict[str, float] = {}
        self._changed = asyncio.Condition()
        self._exits = AsyncExitStack()
        self._channel: grpc.aio.Channel | None = None
        self._ends: tuple[TcpRelay, ...] = ()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            far_end = await exits.enter_async_context(TcpRelay(self._hub))
            self._channel = await exits.enter_async_context(dial(far_end.address))
            server = await start_server([Servicer(add=self._add, methods=object())])
            await exits.enter_async_context(server)
            near_end = await exits.enter_async_context(TcpRelay(server.address))
            self._ends = (near_end, far_end)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    @property
    def address(self) -> str:
        """What the member dials instead of the hub."""
        if not self._ends:
            raise RuntimeError("open the line first: async with Line(...)")
        return self._ends[0].address

    def cut(self) -> None:
        """Break every stream and call at both ends, with whatever is on its way.

        A new dial goes through.
        """
        for end in self._ends:
            end.cut()

    def unplug(self) -> None:
        """Break every stream and call, and each new dial until `plug`."""
        for end in self._ends:
            end.unplug()

    def plug(self) -> None:
        for end in self._ends:
            end.plug()

    def refuse(
        self,
        method: str,
        answer: AstraflowError | grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
        *,
        times: int = 1,
    ) -> None:
        """Answer the next calls of a method with an error.

        gRPC itself repeats a call that was UNAVAILABLE up to three times.

        Args:
            method: Such as `AckBatch`.
            answer: A status, or an error of the house with its reason.
            times: How many calls.
        """
        self._refusals[method] += [answer] * times

    def hold(self, method: str) -> None:
        """Keep calls of a method waiting until `release`."""
        self._gates.setdefault(method, asyncio.Event())

    def release(self, method: str) -> None:
        """Let the calls of a method go on."""
        gate = self._gates.pop(method, None)
        if gate is not None:
            gate.set()

    def delay(self, method: str, seconds: float) -> None:
        """Make each call of a method so much later; 0: none."""
        self._delays[method] = seconds

    def stretch(self, round_trip_s: float) -> None:
        """Make the way longer: every byte takes half of that in each direction."""
        if self._ends:
            self._ends[0].delay_s = round_trip_s / 2

    def silence(self) -> None:
        """Hold keep-alives: streams go on, but the member seems dead until `release`."""
        self.hold(KEEP_ALIVE)

    @property
    def is_silent(self) -> bool:
        """Whether keep-alives are held."""
        return KEEP_ALIVE in self._gates

    async def until(self, claim: Callable[[], object]) -> None:
        """Wait until a call makes a claim true."""
        async with self._changed:
            await self._changed.wait_for(claim)

    def _add(self, _methods: object, server: Any) -> None:
        server.add_registered_method_handlers("astraflow.testing.Line", {})
        server.add_generic_rpc_handlers((_EveryMethod(self._pass_on),))

    async def _pass_on(self, method: str, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """Make the same call of the hub and pass on what it answers, as bytes."""
        await self._meddle(method.rpartition("/")[2], context)
        call = cast("Any", self._channel).stream_stream(method)(
            requests,
            metadata=[
                pair for pair in context.invocation_metadata() if not pair[0].startswith(_OWN_KEYS)
            ],
            timeout=context.time_remaining(),
        )
        try:
            # The hub's headers pass at once: a caller that has none repeats a call that is cut.
            headers = await call.initial_metadata()
            if not call.done():
                await context.send_initial_metadata(tuple(headers or ()))
            async for answer in call:
                yield answer
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", trailing)
        finally:
            call.cancel()

    async def _meddle(self, method: str, context: Any) -> None:
        """Do to a call what the test asked for."""
        async with self._changed:
            self.calls[method] += 1
            self._changed.notify_all()
        if gate := self._gates.get(method):
            await gate.wait()
        if seconds := self._delays.get(method):
            await asyncio.sleep(seconds)
        if self._refusals[method]:
            answer = self._refusals[method].pop(0)
            if isinstance(answer, AstraflowError):
                raise answer
            await context.abort(answer, "refused, as the test asked for")


class _EveryMethod(
    grpc.GenericRpcHandler  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs only
):
    """Takes calls of any method: on the wire, all kinds of calls look like two streams."""

    def __init__(self, pass_on: Callable[[str, Any, Any], AsyncIterator[bytes]]) -> None:
        self._pass_on = pass_on

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a method."""
        method = str(handler_call_details.method)

        async def pass_on(requests: Any, context: Any) -> AsyncIterator[bytes]:
            async for answer in self._pass_on(method, requests, context):
                yield answer

        # Its stubs leave the types of handlers open.
        return cast("Any", grpc).stream_stream_rpc_method_handler(pass_on)
