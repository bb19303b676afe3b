"""The gRPC lane: always there. One round trip to the first byte, connections stay warm."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import grpc.aio
from grpc.aio import AioRpcError

from astraflow.codec.chunks import CHUNK_NBYTES, chunk_invalid
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Layout
from astraflow.core.versions import LaneKind
from astraflow.rpc.auth import transfer_metadata
from astraflow.rpc.channel import MAX_MESSAGE_NBYTES, dial
from astraflow.rpc.errors import is_answer, raised_from
from astraflow.rpc.tls import Tls
from astraflow.transport.frames import MAX_PLAN_NBYTES, plan_nbytes, source_late
from astraflow.wire.fields import TABLES
from astraflow.wire.transfers import (
    LaneEndpoint,
    SentItem,
    TransferPlan,
    TransferSpec,
    Waiting,
    decode_lane_endpoint,
    decode_transfer_plan,
    encode_transfer_plan,
    encode_transfer_spec,
)
from astraflow.wire.weights import decode_layout, decode_sent_chunk, encode_sent_chunk
from astraflow_proto.weights.v1 import transfer_service_pb2 as pb
from astraflow_proto.weights.v1.transfer_service_pb2_grpc import TransferServiceStub

_MAX_CHANNELS: Final = 32

# Its stubs lack it.
_EOF: Final[object] = cast("Any", grpc.aio).EOF


class GrpcLane:
    """Pulls from any number of sources, each over a channel that is kept."""

    def __init__(self, *, tls: Tls | None = None, stall_timeout_s: float = 30.0) -> None:
        self._tls = tls
        self._stall_timeout_s = stall_timeout_s
        # By endpoint, and by what a message has at most; and how many calls use each.
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        self._used = Counter[tuple[str, int]]()

    async def pull(
        self, endpoint: str, spec: TransferSpec, transfer_token: bytes
    ) -> AsyncGenerator[SentItem]:
        """Yield the plan, then its chunks, as they arrive; Waiting between them.

        Args:
            endpoint: host:port of a TransferService.
            spec: What is wanted.
            transfer_token: Of the run.

        Raises:
            AstraflowError: What the source answered; SOURCE_UNREACHABLE, SOURCE_TIMEOUT when it
                did not, or not to the end; CHUNK_INVALID for a message that cannot be read.
        """
        request = pb.PullRequest(spec=encode_transfer_spec(spec))
        # A message has a chunk at most, or a plan that was registered.
        most = MAX_PLAN_NBYTES if spec.bound is None else plan_nbytes(spec.bound)
        nbytes = CHUNK_NBYTES if most <= CHUNK_NBYTES else MAX_MESSAGE_NBYTES
        async with self._stub(endpoint, nbytes=nbytes) as stub:
            call = stub.Pull(request, metadata=transfer_metadata(transfer_token))
            try:
                while True:
                    async with asyncio.timeout(self._stall_timeout_s):
                        response = await call.read()
                    if response is _EOF:
                        return
                    yield decode_response(response)
            except AioRpcError as error:
                raise _failure(endpoint, error) from error
            except TimeoutError:
                why = f"{endpoint} has sent nothing for {self._stall_timeout_s:g} s"
                raise source_late(why) from None
            finally:
                call.cancel()

    async def get_layout(self, endpoint: str, digest: bytes, transfer_token: bytes) -> Layout:
        """Return a layout; the caller proves it by its digest.

        Raises:
            AstraflowError: LAYOUT_UNKNOWN, or what else the source answered; SOURCE_UNREACHABLE,
                SOURCE_TIMEOUT; INVALID_FIELD for a layout that cannot be one.
        """
        request = pb.GetLayoutRequest(layout_digest=digest)
        given = (endpoint, "GetLayout", request, transfer_token)
        try:
            answer = await self._answer(*given)
        except AstraflowError as error:
            if not _is_too_large(error.__cause__):
                raise
            answer = await self._answer(*given, nbytes=MAX_MESSAGE_NBYTES)
        return decode_layout(answer.layout)

    async def list_lanes(self, endpoint: str, transfer_token: bytes) -> list[LaneEndpoint]:
        """Return what else a source serves over; CAPABILITY_MISSING where nothing else is known."""
        answer = await self._answer(endpoint, "ListLanes", pb.ListLanesRequest(), transfer_token)
        # A source of a later release may have lanes that this one has no name for.
        known = (e for e in answer.endpoints if not e.lane or e.lane in TABLES[LaneKind].members)
        try:
            return [*map(decode_lane_endpoint, known)]
        except AstraflowError as error:
            raise _unsound(error) from error

    async def _answer(
        self,
        endpoint: str,
        method: str,
        request: Any,
        transfer_token: bytes,
        *,
        nbytes: int = CHUNK_NBYTES,
    ) -> Any:
        given = {"metadata": transfer_metadata(transfer_token), "timeout": self._stall_timeout_s}
        async with self._stub(endpoint, nbytes=nbytes) as stub:
            try:
                return _parsed(await getattr(stub, method)(request, **given))
            except AioRpcError as error:
                raise _failure(endpoint, error) from error

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    @asynccontextmanager
    async def _stub(self, endpoint: str, *, nbytes: int) -> AsyncGenerator[Any]:
        """Give a stub; a channel that was not used for long makes room, one in use does not."""
        key = endpoint, nbytes
        channel = self._channels.pop(key, None)
        channel = channel or dial(endpoint, tls=self._tls, max_answer_nbytes=nbytes)
        self._channels[key] = channel
        self._used[key] += 1
        try:
            idle = [each for each in self._channels if not self._used[each]]
            excess = max(0, len(self._channels) - _MAX_CHANNELS)
            for each in [self._channels.pop(each) for each in idle[:excess]]:
                await each.close(None)
            yield cast("Any", TransferServiceStub(channel))
        finally:
            self._used[key] -= 1
            self._used += Counter[tuple[str, int]]()


def _parsed(response: Any) -> Any:
    """Return a message; grpc gives None for bytes that are none."""
    if response is None:
        raise chunk_invalid("the source sent bytes that are no message of the contract")
    return response


def encode_response(item: SentItem) -> pb.PullResponse:
    match item:
        case TransferPlan():
            return pb.PullResponse(plan=encode_transfer_plan(item))
        case Waiting():
            return pb.PullResponse(waiting=pb.Waiting())
        case _:
            return pb.PullResponse(chunk=encode_sent_chunk(item))


def decode_response(response: pb.PullResponse | None) -> SentItem:
    """Return what a message of `Pull` carries; grpc gives None for bytes that are none."""
    message: pb.PullResponse = _parsed(response)
    try:
        match message.WhichOneof("item"):
            case "plan":
                return decode_transfer_plan(message.plan)
            case "waiting":
                return Waiting()
            case _:
                return decode_sent_chunk(message.chunk)
    except AstraflowError as error:
        raise _unsound(error) from error


def _unsound(error: AstraflowError) -> AstraflowError:
    return chunk_invalid(f"a message of the transfer is not sound: {error.message}")


def _is_too_large(error: BaseException | None) -> bool:
    if not isinstance(error, AioRpcError) or is_answer(error):
        return False
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _failure(endpoint: str, error: AioRpcError) -> AstraflowError:
    if is_answer(error):
        return raised_from(error)
    if _is_too_large(error):
        return chunk_invalid(f"{endpoint} sent a message that is larger than any may be")
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return AstraflowError(
        Reason.SOURCE_TIMEOUT if is_late else Reason.SOURCE_UNREACHABLE,
        f"{endpoint}: {error.details() or error.code().name}",
        retryable=True,
        metadata={"status": error.code().name},
    )
