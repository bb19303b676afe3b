"""What a peer who lies, or knows no secret, can make of a transfer."""

import asyncio
import os
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

import psutil
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.rpc.address import split_address
from astraflow.transport.assembly import FrameInbox
from astraflow.transport.frames import (
    HEADER_NBYTES,
    Frame,
    FrameKind,
    chunk_frame,
    chunk_frames,
    read_failure,
    request,
    unpack,
)
from astraflow.transport.handshake import (
    GREETING_NBYTES,
    GROUP_NBYTES,
    WELCOME_NBYTES,
    PullerHandshake,
    SourceHandshake,
)
from astraflow.transport.shm import ArenaPool
from astraflow.wire.transfers import TransferBound, TransferPlan
from astraflow.wire.weights import PatchIndex, SentChunk


@pytest.fixture
def chunk(tools):
    return tools.chunk_of(0, 100_000)


@pytest.fixture
def plan(tools, chunk):
    index = PatchIndex(patch=tools.patch_of([chunk]), chunk_digests=(bytes(32),))
    return TransferPlan(
        patches=(index,),
        chunk_count=1,
        payload_nbytes=index.patch.payload_nbytes,
    )


@pytest.fixture
def inbox(plan):
    taking = FrameInbox(stall_timeout_s=5.0)
    taking.take_plan(plan)
    return taking


def test_a_plan_has_what_its_patches_have_and_no_more_than_was_registered(plan):
    registered = TransferBound(patch_count=1, chunk_count=1, payload_nbytes=100_000)
    for lie in ({"payload_nbytes": 1 << 28}, {"chunk_count": 2}):
        with pytest.raises(AstraflowError) as caught:
            FrameInbox(stall_timeout_s=5.0, bound=registered).take_plan(replace(plan, **lie))
        assert caught.value.reason is Reason.CHUNK_INVALID

    (index,) = plan.patches
    other = replace(index, patch=replace(index.patch, payload_nbytes=1 << 28))
    with pytest.raises(AstraflowError) as caught:
        FrameInbox(stall_timeout_s=5.0, bound=registered).take_plan(
            replace(plan, patches=(other,), payload_nbytes=1 << 28)
        )
    assert caught.value.reason is Reason.PATCH_UNKNOWN
    FrameInbox(stall_timeout_s=5.0, bound=registered).take_plan(plan)


def test_before_the_plan_no_more_comes_than_was_registered(chunk):
    registered = TransferBound(patch_count=1, chunk_count=1, payload_nbytes=99_999)
    inbox = FrameInbox(stall_timeout_s=5.0, bound=registered)
    refused(inbox, frames_of(chunk, 8192)[0][0])
    refused(inbox, Frame(kind=FrameKind.PLAN, body_nbytes=9, payload_nbytes=1 << 20))


def frames_of(chunk, segment_nbytes):
    return [*chunk_frames(SentChunk(patch_index=0, chunk=chunk), segment_nbytes)]


def refused(inbox, frame):
    with pytest.raises(AstraflowError) as caught:
        inbox.place(frame)
    assert caught.value.reason is Reason.CHUNK_INVALID


def test_bytes_that_one_connection_announced_are_brought_by_no_other(inbox, chunk):
    ((whole, _),) = frames_of(chunk, 1 << 20)
    first, second, *_ = (frame for frame, _ in frames_of(chunk, 8192))
    inbox.place(second)

    refused(inbox, whole)
    refused(inbox, second)
    refused(inbox, replace(second, body_offset=4096))
    assert len(inbox.place(first)) == first.body_nbytes


async def test_who_brought_bytes_cannot_write_to_them_again(inbox, chunk):
    views = []
    for frame, body in frames_of(chunk, 8192):
        views.append(inbox.place(frame))
        views[-1][:] = body
        inbox.filled(frame, views[-1])

    items = inbox.items()
    await anext(items)
    sent = await anext(items)

    for view in views:
        with pytest.raises(ValueError, match="released"):
            view[0] = 0
    assert sent.chunk.payload.readonly
    assert bytes(sent.chunk.payload) == chunk.payload


def test_parts_are_not_so_small_that_noting_them_takes_more_than_they_bring(inbox, chunk):
    frame, _ = frames_of(chunk, 8192)[1]

    refused(inbox, replace(frame, body_nbytes=1))
    refused(inbox, replace(frame, body_nbytes=0))
    refused(inbox, replace(frame, body_offset=frame.payload_nbytes, body_nbytes=0))


async def test_what_was_taken_out_of_an_arena_stays_when_its_source_writes_on(plan, chunk):
    arena = ArenaPool().take(chunk.header.payload_nbytes)
    inbox = FrameInbox(stall_timeout_s=5.0, on_plan=lambda _: arena.payload)
    inbox.take_plan(plan)
    os.pwrite(arena.descriptor, chunk.payload, 0)
    frame = chunk_frame(SentChunk(patch_index=0, chunk=chunk), body_nbytes=0, body_offset=0)
    inbox.filled(frame, inbox.place(frame))

    items = inbox.items()
    await anext(items)
    sent = await anext(items)
    os.pwrite(arena.descriptor, bytes(len(chunk.payload)), 0)

    assert bytes(sent.chunk.payload) == chunk.payload


def test_two_payloads_of_an_arena_never_share_memory():
    arena = ArenaPool().take(200)
    os.pwrite(arena.descriptor, b"a" * 100, 0)
    first = arena.payload(0, 100)
    os.pwrite(arena.descriptor, b"b" * 100, 0)
    arena.payload(0, 100)

    assert bytes(first) == b"a" * 100
    with pytest.raises(AstraflowError, match="outside"):
        arena.payload(0, 100)


SECRET = b"secret of the run"
GROUP = bytes(range(GROUP_NBYTES))


def shaken(source, puller):
    """Return both ends' channels after a handshake."""
    hello = puller.hello(source.greeting)
    welcome, channel = source.welcome(hello, SECRET)
    puller.check(welcome)
    return hello, channel, puller.channel()


@pytest.fixture(params=[False, True], ids=["clear", "sealed"])
def ends(request):
    source = SourceHandshake(LaneKind.TCP, seals=request.param)
    return source, PullerHandshake(LaneKind.TCP, GROUP, SECRET, must_seal=request.param)


def test_a_proof_holds_for_its_secret_lane_and_connection_only(ends):
    source, puller = ends
    hello, *_ = shaken(source, puller)

    assert source.is_proven(hello, SECRET)
    assert not source.is_proven(hello, b"another")
    assert not source.is_proven(hello, b"")
    assert not SourceHandshake(LaneKind.TCP, seals=False).is_proven(hello, SECRET)
    for at in range(len(hello)):
        changed = bytearray(hello)
        changed[at] ^= 1
        assert not source.is_proven(bytes(changed), SECRET)
    elsewhere = PullerHandshake(LaneKind.UCX, GROUP, SECRET, must_seal=False)
    assert not source.is_proven(elsewhere.hello(source.greeting), SECRET)


def test_a_source_that_does_not_know_the_secret_is_left(ends):
    source, puller = ends
    hello = puller.hello(source.greeting)
    welcome, _ = source.welcome(hello, b"guess")

    with pytest.raises(AstraflowError) as caught:
        puller.check(welcome)
    assert caught.value.reason is Reason.SOURCE_UNREACHABLE


def test_who_must_seal_answers_nobody_who_does_not():
    source = SourceHandshake(LaneKind.TCP, seals=False)
    puller = PullerHandshake(LaneKind.TCP, GROUP, SECRET, must_seal=True)
    with pytest.raises(AstraflowError) as caught:
        puller.hello(source.greeting)
    assert caught.value.reason is Reason.LANE_UNAVAILABLE

    # Nor does it help to change the source's greeting on its way.
    pretended = SourceHandshake(LaneKind.TCP, seals=True).greeting
    assert not source.is_proven(puller.hello(pretended), SECRET)


def test_a_request_is_proven_once_and_on_its_connection_alone(ends):
    source, puller = ends
    _, here, there = shaken(source, puller)
    first, second = there.prove(SECRET, b"spec"), there.prove(SECRET, b"spec")

    assert here.is_proven([b"older", SECRET], first, b"spec")
    assert not here.is_proven([SECRET], first, b"spec")
    *_, other = shaken(SourceHandshake(LaneKind.TCP, seals=source.greeting[4] == 1), puller)
    assert not here.is_proven([SECRET], other.prove(SECRET, b"spec"), b"spec")
    assert not here.is_proven([SECRET], second, b"another")
    assert not here.is_proven([b""], there.prove(b"", b"spec"), b"spec")


def test_records_that_were_changed_repeated_or_left_out_are_refused():
    source = SourceHandshake(LaneKind.TCP, seals=True)
    puller = PullerHandshake(LaneKind.TCP, GROUP, SECRET, must_seal=True)
    _, here, there = shaken(source, puller)
    frames = [[bytes([n]) * HEADER_NBYTES, b"weights"] for n in range(4)]
    sent = [here.sealed(frame) for frame in frames]

    assert b"weights" not in b"".join(b"".join(records) for records in sent)
    assert [*map(there.opened, sent[0])] == frames[0]
    body = memoryview(bytearray(7))
    there.opened(sent[1][0])
    there.open_into(memoryview(sent[1][1]), body)
    assert body == b"weights"
    flipped = bytes([sent[2][0][0] ^ 1]) + sent[2][0][1:]
    for record in (flipped, sent[1][0], sent[3][0], *there.sealed(frames[0])):
        with pytest.raises(AstraflowError, match="changed on its way"):
            there.opened(record)


class Raw:
    """A connection to a lane of a source, by hand."""

    def __init__(self, source):
        self.sock = socket.create_connection(split_address(source.hosts.endpoints[0].address))
        self.sock.settimeout(30)

    def receive(self, nbytes):
        data = b""
        with suppress(ConnectionResetError):
            while len(data) < nbytes and (part := self.sock.recv(nbytes - len(data))):
                data += part
        return data

    def shake(self, secret=SECRET):
        puller = PullerHandshake(LaneKind.TCP, GROUP, secret, must_seal=False)
        hello = puller.hello(self.receive(GREETING_NBYTES))
        self.sock.sendall(hello)
        return hello, puller, self.receive(WELCOME_NBYTES)


@pytest.fixture
def dial():
    """Connect by hand."""
    with ExitStack() as stack:

        def connect(source):
            raw = Raw(source)
            stack.callback(raw.sock.close)
            return raw

        yield connect


async def test_what_one_puller_sent_opens_nothing_for_another(serve, tools, dial):
    source = await serve(lanes=[LaneKind.TCP])

    def replay():
        honest, thief = dial(source), dial(source)
        hello, puller, welcome = honest.shake()
        puller.check(welcome)
        asked = b"".join(request(tools.spec, partial(puller.channel().prove, SECRET)))
        honest.sock.sendall(asked)
        assert honest.receive(HEADER_NBYTES)
        thief.receive(GREETING_NBYTES)
        thief.sock.sendall(hello + asked)
        return thief.receive(1)

    assert await asyncio.to_thread(replay) == b""
    assert source.calls == ["request"]


async def test_a_request_that_is_sent_again_is_refused(serve, tools, dial):
    source = await serve(lanes=[LaneKind.TCP])

    def replay():
        raw = dial(source)
        _, puller, _ = raw.shake()
        asked = b"".join(request(tools.spec, partial(puller.channel().prove, SECRET)))
        raw.sock.sendall(asked + asked)
        while True:
            frame = unpack(raw.receive(HEADER_NBYTES))
            body = raw.receive(frame.body_nbytes)
            if frame.kind is FrameKind.FAILURE:
                return read_failure(body)

    assert (await asyncio.to_thread(replay)).reason is Reason.TOKEN_INVALID
    assert source.calls == ["request"]


async def test_who_asks_again_and_again_and_reads_nothing_is_left(serve, tools, dial):
    source = await serve(lanes=[LaneKind.TCP])
    source.chunks = [tools.chunk_of(0, 4 << 20)] * 16

    def ask():
        raw = dial(source)
        _, puller, _ = raw.shake()
        channel = puller.channel()
        with suppress(OSError):
            for _ in range(1000):
                raw.sock.sendall(b"".join(request(tools.spec, partial(channel.prove, SECRET))))
        return raw

    raw = await asyncio.to_thread(ask)
    await tools.settled(lambda: source.transfers and source.transfers[-1].is_closed)
    raw.sock.close()
    assert len(source.transfers) < 100


async def test_who_proves_nothing_is_read_for_64_bytes_and_left(serve, dial):
    source = await serve(lanes=[LaneKind.TCP])

    def flood():
        raw = dial(source)
        raw.receive(GREETING_NBYTES)
        with suppress(OSError):
            for _ in range(4096):
                raw.sock.sendall(bytes(1 << 16))
            return False
        return True

    assert await asyncio.to_thread(flood)
    assert source.calls == []


async def test_hundreds_of_connections_that_prove_nothing_cost_little_and_end(serve, tools, dial):
    source = await serve(lanes=[LaneKind.TCP])
    process = psutil.Process()
    warm = [dial(source) for _ in range(3)]
    before = process.memory_info().rss
    idle = [await asyncio.to_thread(dial, source) for _ in range(300)]
    for each in (*warm, *idle):
        assert len(await asyncio.to_thread(each.receive, GREETING_NBYTES)) == GREETING_NBYTES

    assert process.memory_info().rss - before < 5 << 20
    for each in (*warm, *idle):
        each.sock.close()
    lane = split_address(source.hosts.endpoints[0].address)[1]

    def is_over():
        here = (each for each in process.net_connections("tcp") if each.laddr.port == lane)
        return all(each.status == psutil.CONN_LISTEN for each in here)

    await tools.settled(is_over)
