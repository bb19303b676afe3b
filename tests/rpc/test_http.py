"""Connections that send what is no request, or never end one."""

import asyncio
import socket
from contextlib import ExitStack, closing

import pytest
from starlette.requests import ClientDisconnect

from astraflow.rpc.http import HttpLimits, HttpServer, until_disconnect

HEAD = b"POST / HTTP/1.1\r\nhost: h\r\n"


async def echo(scope, receive, send):
    """Answer with how much came."""
    count, more = 0, True
    while more:
        message = await receive()
        count += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = str(count).encode()
    head = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def address():
    server = await HttpServer.start(
        echo, listen="127.0.0.1:0", limits=HttpLimits(late_answer=b"late")
    )
    yield server.address
    await server.close()


async def answer_to(address, *parts):
    """Send parts, and return all that comes until the connection is closed, or a body came."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        return head + await reader.read(1)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    finally:
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


async def test_a_request_is_answered(address):
    body = b"content-length: 3\r\n\r\nabc"
    assert (await answer_to(address, HEAD, body)).endswith(b"\r\n\r\n3")


@pytest.mark.parametrize(
    "parts",
    [
        [b"nonsense\r\n\r\n"],
        [HEAD, b"x: " + b"y" * 70_000 + b"\r\n\r\n"],
        [b"POST /" + b"y" * 70_000 + b" HTTP/1.1\r\n\r\n"],
        [HEAD, *(b"x%d: %s\r\n" % (n, b"y" * 1000) for n in range(80)), b"\r\n"],
    ],
)
async def test_a_head_that_is_none_is_refused(address, parts):
    assert b" 200 " not in await answer_to(address, *parts)
    assert (await answer_to(address, HEAD, b"content-length: 0\r\n\r\n")).endswith(b"0")


async def test_a_line_that_does_not_end_is_cut_off(address):
    endless = (b"y" * 10_000 for _ in range(1000))
    assert b" 200 " not in await answer_to(address, HEAD, b"x: ", *endless)


async def test_trailers_have_the_same_bound(address):
    chunked = b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    trailers = (b"x%d: %s\r\n" % (n, b"y" * 1000) for n in range(1000))
    assert not (await answer_to(address, HEAD, chunked, *trailers)).endswith(b"3")


async def test_a_large_body_is_no_head(address):
    parts = [b"y" * 10_000] * 20
    sent = await answer_to(address, HEAD, b"content-length: 200000\r\n\r\n", *parts)
    assert sent.endswith(b"\r\n\r\n2")


async def test_who_owes_a_request_makes_room_for_others():
    limits = HttpLimits(host_connection_count=3)
    server = await HttpServer.start(echo, listen="127.0.0.1:0", limits=limits)
    host, port = server.address.split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
    sent = (b"", HEAD, HEAD + b"content-length: 9\r\n\r\n")
    for owed, (_, writer) in zip(sent, opened, strict=True):
        writer.write(owed)
    try:
        whole = HEAD + b"content-length: 0\r\n\r\n"
        for _ in range(3):
            assert (await answer_to(server.address, whole)).endswith(b"0")
        assert await opened[0][0].read() == b""
    finally:
        for _, writer in opened:
            writer.transport.abort()
        await server.close()


async def test_what_is_being_answered_stays():
    answering, going_on = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        answering.set()
        await going_on.wait()
        await echo(scope, receive, send)

    limits = HttpLimits(connection_count=1)
    server = await HttpServer.start(slow, listen="127.0.0.1:0", limits=limits)
    try:
        asked = asyncio.create_task(answer_to(server.address, HEAD, b"content-length: 0\r\n\r\n"))
        await answering.wait()
        assert await answer_to(server.address, HEAD) == b""
        going_on.set()
        assert (await asked).endswith(b"0")
    finally:
        await server.close()


async def test_a_host_of_many_connections_has_its_turn_with_the_others():
    hosts, count, all_asked = [], 65, asyncio.Event()

    async def noted(scope, receive, send):
        hosts.append(scope["client"][0])
        if len(hosts) == count:
            all_asked.set()
        await echo(scope, receive, send)

    server = await HttpServer.start(noted, listen="127.0.0.1:0")
    host, port = server.address.split(":")
    with ExitStack() as stack:
        # The loop has no turn meanwhile: they wait for it together, and the other one is the last.
        for source in ["127.0.0.1"] * (count - 1) + ["127.0.0.9"]:
            address = (source, 0)
            sent = socket.create_connection((host, int(port)), source_address=address)
            stack.enter_context(closing(sent)).sendall(HEAD + b"content-length: 0\r\n\r\n")
        await all_asked.wait()
        await server.close()
    assert hosts.index("127.0.0.9") < count // 2


async def test_a_server_that_cannot_start_says_why():
    class Failing(HttpServer):
        async def startup(self, sockets=None):
            raise OSError("no file is left")

    with pytest.raises(OSError, match="no file is left"):
        await asyncio.wait_for(Failing.start(echo, listen="127.0.0.1:0"), 10)


async def test_a_close_that_is_cancelled_says_so():
    asked, answered = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            answered.set()

    server = await HttpServer.start(slow, listen="127.0.0.1:0")
    asking = asyncio.ensure_future(answer_to(server.address, HEAD, b"content-length: 0\r\n\r\n"))
    await asked.wait()
    closing_it = asyncio.ensure_future(server.close())
    await asyncio.sleep(0)
    closing_it.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing_it
    await server.close()
    await answered.wait()
    await asking


async def test_work_for_a_client_that_left_cleans_up_before_its_answer():
    seen = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("clean")

    async def receive():
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await until_disconnect(receive, work())
    assert seen == ["clean"]
