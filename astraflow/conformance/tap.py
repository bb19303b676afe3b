"""A tap between a member and a run: it sees every message, and breaks what it is set to break."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import SESSION_KEY, TRANSFER_KEY
from astraflow.rpc.channel import SERVER_OPTIONS, dial
from astraflow.rpc.errors import raised_from, status_of
from astraflow_proto.dataflow.v1 import raas_service_pb2, session_service_pb2, trainer_service_pb2
from astraflow_proto.weights.v1 import transfer_service_pb2, version_service_pb2

_FILES = (
    raas_service_pb2,
    session_service_pb2,
    trainer_service_pb2,
    transfer_service_pb2,
    version_service_pb2,
)


def method_of(path: str) -> MethodDescriptor | None:
    """Return the call of a path; None for one that members do not make."""
    return _methods().get(path)


@cache
def _methods() -> dict[str, MethodDescriptor]:
    services = (each for file in _FILES for each in file.DESCRIPTOR.services_by_name.values())
    return {_path(method): method for service in services for method in service.methods}


def _path(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


# Its stubs leave the types of messages open.
_stream_stream = cast("Callable[..., Any]", grpc.stream_stream_rpc_method_handler)  # pyright: ignore[reportUnknownMemberType]

MessageT = TypeVar("MessageT", bound=Message)

_PASSED_ON = frozenset({"authorization", SESSION_KEY, TRANSFER_KEY})
_CONTRACT = "/astraflow."


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of the member.

    Attributes:
        timeout_s: After which the caller gives up; None: never.
        began_s: On the monotonic clock.
        code: How it ended; None while it lasts.
        broken: Ends the call with the error that it is given.
    """

    method: MethodDescriptor
    metadata: dict[str, str | bytes]
    timeout_s: float | None
    began_s: float
    requests: list[Any] = field(default_factory=list[Any])
    responses: list[Any] = field(default_factory=list[Any])
    code: grpc.StatusCode | None = None
    reason: Reason | None = None
    text: str = ""
    broken: "asyncio.Future[None]"

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def service(self) -> str:
        """Name of its service, without the package."""
        return self.method.containing_service.name

    def end(self, error: AstraflowError) -> None:
        """End it with an error, if it lasts."""
        if not self.broken.done():
            self.broken.set_exception(error)


class Fault:
    """What is done to calls and messages that pass: here nothing."""

    def begin(self, call: Call) -> None:
        """Change the secrets or the deadline of a call before it goes on."""

    def request(self, call: Call, message: Any) -> Sequence[Any]:
        """Return what goes on in place of a message of the member.

        Raises:
            AstraflowError: The call ends with it.
        """
        del call
        return [message]

    def response(self, call: Call, message: Any) -> Sequence[Any]:
        """Return what goes on in place of a message to the member; raises as `request`."""
        del call
        return [message]


class Tap(grpc.GenericRpcHandler):  # pyright: ignore[reportMissingTypeArgument] - generic in its stubs only
    """Passes all calls on, each message seen and noted.

    Attributes:
        strange_paths: Called under a name of the contract that has no such call for members.
        address: host:port, once it serves.
        origin: host:port of what answers calls to TransferService; empty: nobody does.
        is_closed: Whether the run behind it may end at any time.
        change_count: How often something changed.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.strange_paths: list[str] = []
        self.faults: list[Fault] = []
        self.address = ""
        self.hub = ""
        self.origin = ""
        self.is_closed = False
        self.change_count = 0
        self._channels: dict[str, Any] = {}
        self._gates: dict[str, tuple[asyncio.Event, Callable[[Any], object]]] = {}
        self._changed = asyncio.Event()

    async def serve(self, listen: str) -> None:
        """Serve on host:port; port 0 takes a free one."""
        self._server: Any = grpc.aio.server(  # pyright: ignore[reportUnknownMemberType]
            handlers=[self], options=SERVER_OPTIONS
        )
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"cannot listen on {listen}; choose another port, or 0"
            ) from error
        await self._server.start()
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    async def close(self) -> None:
        self.is_closed = True
        await self._server.stop(0)
        for channel in self._channels.values():
            await channel.close(None)

    def service(self, handler_call_details: Any) -> Any:
        """Return what answers a call: every kind is a stream both ways on the wire."""
        method = method_of(handler_call_details.method)
        if method is None:
            if handler_call_details.method.startswith(_CONTRACT):
                self.strange_paths.append(handler_call_details.method)
                self.note()
            return None

        async def relay(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
            async for response in self._relay(method, requests, context):
                yield response

        return _stream_stream(relay)

    def of(self, name: str, *, after: Call | None = None) -> list[Call]:
        """Return the calls of a method of which a request came, or those after one of them."""
        start = 0 if after is None else self.calls.index(after) + 1
        return [call for call in self.calls[start:] if call.name == name and call.requests]

    def answered(self, name: str) -> Call | None:
        """Return the last call of a method that was answered."""
        return next((call for call in reversed(self.of(name)) if call.responses), None)

    @contextmanager
    def held(self, name: str, wants: Callable[[Any], object] = bool) -> Generator[None]:
        """Let no response of a method pass within the block, from the first that is wanted on."""
        opened = asyncio.Event()
        self._gates[name] = opened, wants
        try:
            yield
        finally:
            del self._gates[name]
            opened.set()

    async def changed(self) -> None:
        """Wait for the next message or end of a call."""
        self._changed.clear()
        await self._changed.wait()

    def note(self) -> None:
        """Wake who waits for something to change."""
        self.change_count += 1
        self._changed.set()

    async def _relay(
        self, method: MethodDescriptor, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[bytes]:
        call = Call(
            method=method,
            metadata={
                key: value for key, value in context.invocation_metadata() if key in _PASSED_ON
            },
            timeout_s=context.time_remaining(),
            began_s=monotonic(),
            broken=asyncio.get_running_loop().create_future(),
        )
        self.calls.append(call)
        for fault in tuple(self.faults):
            fault.begin(call)
        try:
            async for response in self._exchange(call, requests):
                yield response
            call.code = grpc.StatusCode.OK
        except AstraflowError as error:
            code, call.text, trailing = status_of(error)
            call.code, call.reason = code, error.reason
            await context.abort(code, call.text, trailing)
        except grpc.aio.AioRpcError as error:
            call.code, call.text = error.code(), error.details() or ""
            call.reason = raised_from(error).reason
            await context.abort(call.code, call.text, tuple(error.trailing_metadata()))
        finally:
            call.code = call.code or grpc.StatusCode.CANCELLED
            self.note()

    async def _exchange(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        outgoing = self._channel(call.method).stream_stream(_path(call.method))(
            self._requests(call, requests),
            metadata=tuple(call.metadata.items()),
            timeout=call.timeout_s,
        )
        try:
            async for message in _until(call.broken, outgoing):
                response = parsed(GetMessageClass(call.method.output_type), message)
                opened, wants = self._gates.get(call.name, (None, bool))
                if opened is not None and wants(response):
                    await opened.wait()
                # It is noted once the faults have let it pass.
                passed: list[Any] = [response]
                for fault in tuple(self.faults):
                    passed = [new for each in passed for new in fault.response(call, each)]
                call.responses.extend(passed)
                self.note()
                for each in passed:
                    yield each.SerializeToString()
        finally:
            outgoing.cancel()

    async def _requests(self, call: Call, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        async for raw in requests:
            try:
                message = parsed(GetMessageClass(call.method.input_type), raw)
                call.requests.append(message)
                self.note()
                passed: list[Any] = [message]
                for fault in tuple(self.faults):
                    passed = [new for each in passed for new in fault.request(call, each)]
            except AstraflowError as error:
                call.end(error)
                return
            for each in passed:
                yield each.SerializeToString()

    def _channel(self, method: MethodDescriptor) -> Any:
        address = self.origin if method.containing_service.name == "TransferService" else self.hub
        if address not in self._channels:
            self._channels[address] = dial(address)
        return self._channels[address]


def parsed(kind: type[MessageT], raw: bytes) -> MessageT:
    """Return bytes as a message."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{len(raw)} bytes that are no {kind.DESCRIPTOR.full_name}: generate the messages from"
            " the protos of this release",
        ) from error


async def _until(
    broken: "asyncio.Future[None]", messages: AsyncIterable[bytes]
) -> AsyncGenerator[bytes]:
    """Yield messages until the future raises."""
    reading = aiter(messages)
    waiting: set[asyncio.Future[Any]] = {broken}
    try:
        while True:
            following = asyncio.ensure_future(anext(reading, None))
            waiting = {following, broken}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()
            if (message := await following) is None:
                return
            yield message
    finally:
        for each in waiting:
            # Who ended with an error that nobody asks for would be logged.
            if not each.cancel() and not each.cancelled():
                each.exception()
