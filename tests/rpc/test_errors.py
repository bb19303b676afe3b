import asyncio

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.status_pb2 import Status

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import STATUS, is_answer, raised_from, status_of, translate_errors
from astraflow.rpc.server import Servicer, start_server
from astraflow_proto.evals.v1.eval_service_pb2 import GetEvalRunRequest
from astraflow_proto.evals.v1.eval_service_pb2_grpc import (
    EvalServiceStub,
    add_EvalServiceServicer_to_server,
)


def received(error: AstraflowError, *, code=None) -> grpc.aio.AioRpcError:
    """What a caller sees of an error, without a server."""
    sent, text, trailing = status_of(error)
    return grpc.aio.AioRpcError(
        code or sent, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), text
    )


def foreign(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "some proxy")


def test_every_reason_has_one_status():
    assert set(STATUS) == set(Reason)
    assert grpc.StatusCode.OK not in STATUS.values()
    assert grpc.StatusCode.UNKNOWN not in STATUS.values()


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("is_retryable", [False, True])
def test_every_reason_survives_the_way(reason, is_retryable):
    error = AstraflowError(reason, "über", retryable=is_retryable, metadata={"version": "3"})

    arrived = raised_from(received(error))

    assert arrived.to_failure() == error.to_failure()
    assert is_answer(received(error))


def test_a_long_text_does_not_cost_the_error():
    error = AstraflowError(Reason.INVALID_FIELD, "x" * 10**6, metadata={"field": "y" * 10**6})

    _, text, trailing = status_of(error)

    assert len(text) == 1024
    assert sum(len(value) for _, value in trailing) < 4096
    assert raised_from(received(error)).reason is Reason.INVALID_FIELD


class Refusing:
    """A service that answers with an error."""

    def __init__(self, error):
        self.error = error

    async def GetEvalRun(self, request, context):  # noqa: N802 - named by the contract
        raise self.error


@pytest.mark.parametrize("letter", ["x", "ü", "错", "\N{ROCKET}", "\udcff"])
async def test_a_long_text_of_any_letters_arrives(letter):
    """A status shares a header block of 8 KiB, where a letter takes up to 12 bytes."""
    metadata = {f"{number}{600 * letter}": 600 * letter for number in range(12)}
    error = AstraflowError(Reason.STALE, 6000 * letter, retryable=True, metadata=metadata)
    servicer = Servicer(add=add_EvalServiceServicer_to_server, methods=Refusing(error))
    async with await start_server([servicer]) as server, dial(server.address) as channel:
        with pytest.raises(AstraflowError) as caught, translate_errors():
            await EvalServiceStub(channel).GetEvalRun(GetEvalRunRequest())
    assert caught.value.reason is Reason.STALE
    assert caught.value.retryable
    assert caught.value.message.startswith(100 * (letter if letter.isprintable() else "?"))
    assert caught.value.metadata


@pytest.mark.parametrize(
    ("code", "reason", "is_retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.NOT_READY, True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.NOT_READY, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.MESSAGE_TOO_LARGE, False),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.CAPABILITY_MISSING, False),
        (grpc.StatusCode.UNKNOWN, Reason.INTERNAL, False),
    ],
)
def test_what_no_peer_said_gets_the_nearest_reason(code, reason, is_retryable):
    error = raised_from(foreign(code))

    assert (error.reason, error.retryable) == (reason, is_retryable)
    assert error.metadata == {"status": code.name}
    assert not is_answer(foreign(code))


def test_a_reason_of_a_newer_peer_is_read_by_its_code():
    error = received(AstraflowError(Reason.NOT_READY, "later", retryable=True))
    key, value = next(iter(error.trailing_metadata()))
    newer = value.replace(b"NOT_READY", b"TOO_YOUNG")
    error = grpc.aio.AioRpcError(
        error.code(), grpc.aio.Metadata(), grpc.aio.Metadata((key, newer)), "later"
    )

    assert raised_from(error).reason is Reason.NOT_READY
    assert raised_from(error).metadata == {"reason": "TOO_YOUNG"}


def test_details_that_are_no_status_are_left_alone():
    junk = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), junk, "gone")

    assert raised_from(error).reason is Reason.INTERNAL


def test_a_detail_that_is_none_is_left_alone():
    """What says that it is ErrorInfo, and holds something else."""
    junk = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    trailing = ("grpc-status-details-bin", Status(details=[junk]).SerializeToString())
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(trailing), "gone"
    )

    assert raised_from(error).reason is Reason.INTERNAL


async def test_calls_in_a_body_raise_our_own_error():
    async with dial("127.0.0.1:1") as channel:
        with pytest.raises(AstraflowError) as caught, translate_errors():
            await channel.unary_unary("/test.Echo/unary_unary")(b"")

    assert caught.value.reason is Reason.NOT_READY
    assert caught.value.retryable


async def test_an_ingress_that_knows_no_such_place_may_know_it_later():
    """As while the hub behind it starts again."""

    async def not_found(reader, writer):
        # HTTP/2: empty settings; after the head of a request that of stream 1 with `:status: 404`.
        writer.write(bytes.fromhex("000000 04 00 00000000"))
        await reader.readexactly(len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        kind = 0
        while kind != 1:
            *size, kind, _ = (await reader.readexactly(9))[:5]
            await reader.readexactly(int.from_bytes(bytes(size)))
        writer.write(bytes.fromhex("000001 01 05 00000001 8d"))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        closed.set()

    closed = asyncio.Event()
    server = await asyncio.start_server(not_found, "127.0.0.1")
    address = "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    async with server:
        async with dial(address) as channel:
            with pytest.raises(AstraflowError, match="no gRPC") as caught, translate_errors():
                await channel.unary_unary("/a/B")(b"")
        await closed.wait()
    assert caught.value.reason is Reason.NOT_READY
    assert caught.value.retryable
