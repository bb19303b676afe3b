import grpc
import grpc.aio
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.access import Access, HubTokens, SessionTokens
from astraflow.rpc.channel import dial
from astraflow.rpc.errors import raised_from
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


class Guarded:
    """Pauses for whoever is let in by name."""

    def __init__(self, **identities: str) -> None:
        self._access = Access(
            HubTokens.generate(), sessions=SessionTokens(), roles={}, identities=identities
        )

    async def PauseRun(self, request, context):  # noqa: N802
        self._access.operator(context)
        return pb.PauseRunResponse()


async def test_a_certificate_stands_for_a_role(pem):
    identities = {"localhost": "operator"}
    servicer = Servicer(add=add_ControlServiceServicer_to_server, methods=Guarded(**identities))
    async with await start_server([servicer], tls=pem) as server:
        assert await paused(server.address, pem) == pb.PauseRunResponse()


@pytest.mark.parametrize(
    ("identities", "reason"),
    [
        ({"localhost": "reader"}, Reason.ROLE_NOT_ALLOWED),
        ({"elsewhere": "operator"}, Reason.TOKEN_INVALID),
        ({}, Reason.TOKEN_INVALID),
    ],
)
async def test_a_certificate_of_another_role_is_refused(pem, identities, reason):
    servicer = Servicer(add=add_ControlServiceServicer_to_server, methods=Guarded(**identities))
    async with await start_server([servicer], tls=pem) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await paused(server.address, pem)
    assert raised_from(caught.value).reason is reason


def test_a_certificate_stands_for_no_role_that_there_is_not():
    with pytest.raises(AstraflowError, match="'boss' is no role"):
        Guarded(localhost="boss")


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
