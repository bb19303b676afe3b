"""The rate of a group follows what its way carried; what is alone keeps out of its way."""

import socket

import pytest

from astraflow.transport.frames import HEADER_NBYTES, FrameKind, unpack
from astraflow.transport.groups import Carrier, ConnectionGroup, next_bound
from astraflow.transport.handshake import Channel
from astraflow.transport.sockets import SocketConnection, TcpInfo, tune


def sent(packets, repeats):
    return TcpInfo(packet_count=packets, repeat_count=repeats)


def test_a_way_that_drops_for_want_of_room_is_bounded():
    bound = next_bound(sent(1000, 0), sent(2000, 20), 100e6, None)
    assert bound == pytest.approx(125e6)


def test_losses_by_chance_bound_nothing():
    assert next_bound(sent(1000, 0), sent(2000, 1), 100e6, None) is None


def test_a_bound_rises_while_nothing_is_dropped():
    assert next_bound(sent(1000, 20), sent(2000, 21), 100e6, 50e6) == pytest.approx(55e6)


async def test_the_plan_of_a_large_transfer_goes_over_the_connection_that_takes_none_of_it(
    tools, serve
):
    source = await serve()
    source.chunks = [tools.chunk_of(index, 3 << 20) for index in range(3)]
    group = ConnectionGroup(Carrier(), tools.token)
    pairs = [[SocketConnection(end) for end in socket.socketpair()] for _ in range(3)]
    for here, there in pairs:
        there.sock.setblocking(False)
        tune(here.sock)
        group.join(here, Channel(b"", None))

    group.begin(source.open(tools.spec))

    headers = [await there.receive(HEADER_NBYTES) for _, there in pairs]
    kinds = [unpack(header).kind for header in headers]
    assert kinds == [FrameKind.PLAN, FrameKind.CHUNK, FrameKind.CHUNK]
    await group.close()
    for pair in pairs:
        for end in pair:
            end.close()
