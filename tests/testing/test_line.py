"""A relay between a member and a hub: what is cut is gone, at whatever moment."""

import asyncio
import socket
from contextlib import suppress

import pytest

from astraflow.rpc.address import split_address
from astraflow.testing.line import TcpRelay


async def dial_and_close(turns):
    """Return a connection to a relay that was closed so many turns of the loop later."""
    async with TcpRelay("127.0.0.1:1") as relay:
        caller = socket.create_connection(split_address(relay.address, "relay"))
        for _ in range(turns):
            await asyncio.sleep(0)
    return caller


@pytest.mark.parametrize("turns", range(6))
def test_who_dials_a_relay_as_it_closes_is_hung_up_on(turns):
    with asyncio.run(dial_and_close(turns)) as caller:
        caller.settimeout(20)
        # Reset: nobody had taken the call.
        with suppress(ConnectionResetError):
            assert caller.recv(1) == b""
