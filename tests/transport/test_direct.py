"""A far source is asked where its TCP lane is as a rule, before gRPC is ready."""

import asyncio
import socket

import pytest

from astraflow.core.errors import Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import split_address
from astraflow.transport.sockets import direct_port
from crash_ends.postgres import free_port

# Reached from 127.0.0.1, so that it counts as another machine.
ELSEWHERE = "127.0.0.2:0"


@pytest.fixture
async def source(serve):
    return await serve(lanes=[LaneKind.TCP], listen=ELSEWHERE)


def lane_port(source):
    return split_address(source.hosts.endpoints[0].address)[1]


async def test_the_first_transfer_needs_no_grpc(tools, source, open_lanes):
    if lane_port(source) != direct_port(split_address(source.address)[1]):
        pytest.skip("another process has the port")
    lanes = open_lanes(LaneKind.TCP)

    for _ in range(2):
        assert sorted(await tools.pulled(lanes, source)) == list(range(8))

    assert source.calls == ["request", "request"]


async def test_who_does_not_know_the_secret_is_refused(tools, source, open_lanes):
    error = await tools.failure(open_lanes(LaneKind.TCP), source, token=b"guess")

    assert error.reason is Reason.TOKEN_INVALID
    assert "request" not in source.calls


async def test_somebody_else_at_that_port_is_left_for_where_it_is(tools, serve, open_lanes):
    """He sees no secret, and whatever he answers is not taken."""
    heard = []

    async def answer(reader, writer):
        heard.append(await reader.read(4096))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64))
        await writer.drain()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, "127.0.0.2", direct_port(port)):
        source = await serve(lanes=[LaneKind.TCP], listen=f"127.0.0.2:{port}")

        assert sorted(await tools.pulled(open_lanes(LaneKind.TCP), source)) == list(range(8))

    assert source.calls == ["list", "request"]
    assert heard
    assert not any(tools.token in each for each in heard)


async def test_nobody_at_that_port_is_left_for_where_it_is(tools, serve, open_lanes):
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", direct_port(port)))
        source = await serve(lanes=[LaneKind.TCP], listen=f"127.0.0.2:{port}")

        assert sorted(await tools.pulled(open_lanes(LaneKind.TCP), source)) == list(range(8))

    assert source.calls == ["list", "request"]
