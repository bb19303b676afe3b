import asyncio

import grpc.aio

from astraflow.rpc.channel import COMMON_OPTIONS, PING_INTERVAL_OPTION, SERVER_OPTIONS

# RFC 9113: 3.4 preface, 4.1 frame header (length, type, flags, stream), 6.5 SETTINGS, 6.7 PING.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
EMPTY_SETTINGS = bytes([0, 0, 0, SETTINGS, 0, 0, 0, 0, 0])
PING_FRAME = bytes([0, 0, 8, PING, 0, 0, 0, 0, 0, *b"astraflw"])


async def answer_to_ping(reader: asyncio.StreamReader) -> int:
    """Return the type of the next frame that is a PING or the end."""
    while True:
        header = await reader.readexactly(9)
        await reader.readexactly(int.from_bytes(header[:3], "big"))
        if header[3] in (PING, GOAWAY):
            return header[3]


async def answers_to_pings(count: int, options: dict[str, int]) -> list[int]:
    server = grpc.aio.server(options=list(options.items()))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(PREFACE + EMPTY_SETTINGS)
        answers: list[int] = []
        while len(answers) < count and GOAWAY not in answers:
            writer.write(PING_FRAME)
            answers.append(await answer_to_ping(reader))
        return answers
    finally:
        writer.close()
        await server.stop(None)


async def test_a_quiet_connection_is_not_cut_for_its_keepalive():
    """Pings without data pass when they are no closer than the server's interval, here 0."""
    options = {**dict(SERVER_OPTIONS), PING_INTERVAL_OPTION: 0}

    assert await answers_to_pings(20, options) == [PING] * 20


async def test_a_flood_of_pings_is_cut():
    assert (await answers_to_pings(20, dict(SERVER_OPTIONS)))[-1] == GOAWAY


def test_a_server_allows_the_keepalive_of_callers():
    assert (
        dict(SERVER_OPTIONS)[PING_INTERVAL_OPTION] < dict(COMMON_OPTIONS)["grpc.keepalive_time_ms"]
    )
