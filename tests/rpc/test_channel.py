import grpc
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.rpc.channel import dial


class Flaky:
    """Is not ready for a number of calls, then answers."""

    def __init__(self, failures):
        self.failures = failures

    async def unary_unary(self, request, context):
        if self.failures:
            self.failures -= 1
            raise AstraflowError(Reason.NOT_READY, "starting", retryable=True)
        return request


async def test_a_call_is_never_repeated_behind_the_callers_back(serve):
    async with serve(Flaky(1)) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("unary_unary")

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_two_channels_are_two_connections(serve):
    peers = set()

    class Notes:
        async def unary_unary(self, request, context):
            peers.add(context.peer())
            return request

    async with serve(Notes()) as call, dial(call.address) as second:
        await call("unary_unary")
        await second.unary_unary("/test.Echo/unary_unary")(b"x")

    assert len(peers) == 2


async def test_a_proxy_of_the_environment_does_not_stand_before_loopback(serve, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async with serve(Flaky(0)) as call:
        assert await call("unary_unary", b"hi") == [b"hi"]


async def test_an_address_needs_a_port():
    with pytest.raises(AstraflowError, match="is not host:port"):
        dial("localhost")


class Names:
    """Answers with a name of its own."""

    def __init__(self, name):
        self.name = name

    async def unary_unary(self, request, context):
        return self.name


async def test_several_addresses_are_tried_in_turn(serve):
    async with serve(Names(b"second")) as second:
        async with serve(Names(b"first")) as first:
            both = f"localhost:{first.address.rpartition(':')[2]}, {second.address}"
            channel = dial(both)
            ask = channel.unary_unary("/test.Echo/unary_unary")
            assert await ask(b"x") == b"first"
        assert await ask(b"x", wait_for_ready=True) == b"second"
        await channel.close()
        async with dial(both) as late:
            ask = late.unary_unary("/test.Echo/unary_unary")
            assert await ask(b"x", wait_for_ready=True) == b"second"


@pytest.mark.parametrize("address", ["127.0.0.1:1,nowhere", "127.0.0.1:1,no.such.host.invalid:2"])
def test_each_of_several_addresses_must_be_one(address):
    with pytest.raises(AstraflowError) as caught:
        dial(address)
    assert caught.value.reason is Reason.INVALID_FIELD
