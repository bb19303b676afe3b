import asyncio
import socket
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.auth import TRANSFER_KEY, has_secret, transfer_metadata
from astraflow.rpc.channel import MAX_MESSAGE_NBYTES, dial
from astraflow.rpc.errors import raised_from
from astraflow.rpc.server import Servicer, start_server
from astraflow_proto.control.v1 import control_service_pb2 as pb
from astraflow_proto.control.v1.control_service_pb2_grpc import (
    ControlServiceStub,
    add_ControlServiceServicer_to_server,
)

CONTROL = Servicer(add=add_ControlServiceServicer_to_server, methods=object())
SERVICE = "astraflow.control.v1.ControlService"


async def test_health_knows_the_server_and_each_service():
    request = health_pb2.HealthCheckRequest
    async with await start_server([CONTROL]) as server, dial(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        before = [await health.Check(request(service=name)) for name in ("", SERVICE)]
        await server.set_serving(False)
        after = [await health.Check(request(service=name)) for name in ("", SERVICE)]

    assert {each.status for each in before} == {health_pb2.HealthCheckResponse.SERVING}
    assert {each.status for each in after} == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_reflection_names_the_services_and_has_their_files():
    request = reflection_pb2.ServerReflectionRequest
    async with await start_server([CONTROL]) as server, dial(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([request(list_services=""), request(file_containing_symbol=SERVICE)])
        )
        names, files = [answer async for answer in call]

    assert {each.name for each in names.list_services_response.service} == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert files.file_descriptor_response.file_descriptor_proto


async def test_an_rpc_that_is_left_out_names_its_capability():
    async with await start_server([CONTROL]) as server, dial(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ControlServiceStub(channel).SaveRun(pb.SaveRunRequest())

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "'save_run'" in caught.value.details()


async def test_a_large_request_is_read_for_who_is_known_alone():
    read = []

    class Saves:
        async def SaveRun(self, request, context):  # noqa: N802
            read.append(len(request.checkpoint_id))
            return pb.SaveRunResponse()

    def knows(context):
        return has_secret(context, TRANSFER_KEY, b"secret")

    servicer = replace(CONTROL, methods=Saves())
    async with (
        await start_server([servicer], knows=knows) as server,
        dial(server.address) as channel,
    ):
        stub, large = ControlServiceStub(channel), pb.SaveRunRequest(checkpoint_id="c" * 100_000)
        await stub.SaveRun(pb.SaveRunRequest(checkpoint_id="c"))
        await stub.SaveRun(large, metadata=transfer_metadata(b"secret"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SaveRun(large, metadata=transfer_metadata(b"guess"))

    assert raised_from(caught.value).reason is Reason.TOKEN_INVALID
    assert read == [1, 100_000]


async def test_a_request_of_megabytes_is_read_for_nobody():
    """Made of its bytes, it took gigabytes."""
    read = []

    class Saves:
        async def SaveRun(self, request, context):  # noqa: N802
            read.append(len(request.checkpoint_id))
            return pb.SaveRunResponse()

    async with (
        await start_server([replace(CONTROL, methods=Saves())]) as server,
        dial(server.address) as channel,
    ):
        stub = ControlServiceStub(channel)
        await stub.SaveRun(pb.SaveRunRequest(checkpoint_id="c" * 2_000_000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.SaveRun(pb.SaveRunRequest(checkpoint_id="c" * 3_000_000))

    assert raised_from(caught.value).reason is Reason.MESSAGE_TOO_LARGE
    assert read == [2_000_000]


async def test_what_is_no_message_of_a_call_is_refused_by_name():
    class Gets:
        async def GetRun(self, request, context):  # noqa: N802
            return pb.GetRunResponse()

    async with (
        await start_server([replace(CONTROL, methods=Gets())]) as server,
        dial(server.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/GetRun")(b"\xff")

    assert raised_from(caught.value).reason is Reason.INVALID_FIELD


async def test_a_port_in_use_is_refused_in_clear_words():
    async with await start_server([]) as server:
        with pytest.raises(AstraflowError, match="address already in use; choose") as caught:
            await start_server([], listen=server.address)

    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata == {"field": "listen"}


async def test_a_host_that_is_not_ours_is_refused_in_clear_words():
    with pytest.raises(AstraflowError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await start_server([], listen="192.0.2.1:0")


async def test_a_wrong_listen_address_is_refused():
    with pytest.raises(AstraflowError, match="listen: '7070' is not host:port"):
        await start_server([], listen="7070")


async def test_the_port_is_free_after_stop():
    server = await start_server([])
    await server.stop()
    await server.stop()

    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


async def test_stop_lets_running_calls_end():
    begun, go = asyncio.Event(), asyncio.Event()

    class Slow:
        async def PauseRun(self, request, context):  # noqa: N802
            begun.set()
            await go.wait()
            return pb.PauseRunResponse()

    server = await start_server([replace(CONTROL, methods=Slow())])
    async with dial(server.address) as channel, asyncio.TaskGroup() as group:
        pausing = ControlServiceStub(channel).PauseRun(pb.PauseRunRequest())
        await begun.wait()
        group.create_task(server.stop(grace_s=60))
        go.set()
        assert await pausing == pb.PauseRunResponse()

    assert await pausing.code() is grpc.StatusCode.OK


async def test_a_message_of_the_largest_size_passes(serve):
    class Measures:
        async def unary_unary(self, request, context):
            return str(len(request)).encode()

    async with serve(Measures()) as call:
        assert await call("unary_unary", bytes(MAX_MESSAGE_NBYTES)) == [b"67108864"]


async def test_advertises_what_it_was_told():
    async with await start_server([], advertise="hub.example") as server:
        assert server.address == f"hub.example:{server.port}"
