import grpc
import grpc.aio
import pytest

from astraflow.core.errors import AstraflowError
from astraflow.rpc.channel import dial
from astraflow.rpc.server import Servicer, start_server
from astraflow.rpc.tls import Tls, channel_credentials, server_credentials
from astraflow_proto.control.v1 import control_service_pb2 as pb
from astraflow_proto.control.v1.control_service_pb2_grpc import (
    ControlServiceStub,
    add_ControlServiceServicer_to_server,
)


class Control:
    async def PauseRun(self, request, context):  # noqa: N802
        return pb.PauseRunResponse()


SERVICER = Servicer(add=add_ControlServiceServicer_to_server, methods=Control())


async def paused(address, tls):
    async with dial(address, tls=tls) as channel:
        return await ControlServiceStub(channel).PauseRun(pb.PauseRunRequest(), timeout=100)


async def test_both_sides_know_each_other(pem):
    async with await start_server([SERVICER], tls=pem) as server:
        assert await paused(server.address, pem) == pb.PauseRunResponse()


async def test_a_server_without_ca_takes_callers_without_certificate(pem):
    own = Tls(certificate=pem.certificate, key=pem.key)
    async with await start_server([SERVICER], tls=own) as server:
        assert await paused(server.address, Tls(ca=pem.ca)) == pb.PauseRunResponse()


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_caller_that_is_not_known_gets_no_answer(pem, is_plain):
    tls = None if is_plain else Tls(ca=pem.ca)
    async with await start_server([SERVICER], tls=pem) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await paused(server.address, tls)

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_goes_with_its_key(pem):
    with pytest.raises(AstraflowError, match="certificate and key together"):
        Tls(certificate=pem.certificate)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(AstraflowError, match=r"tls\.ca: .*nowhere.pem cannot be read"):
        channel_credentials(Tls(ca=tmp_path / "nowhere.pem"))


def test_a_server_needs_a_certificate(pem):
    with pytest.raises(AstraflowError, match="needs a certificate"):
        server_credentials(Tls(ca=pem.ca))
