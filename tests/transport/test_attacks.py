"""What a peer who lies, or knows no secret, can make of a transfer."""

import os
from dataclasses import replace

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.arenas import ArenaPool
from astraflow.transport.assembly import FrameInbox
from astraflow.transport.frames import chunk_frame, chunk_frames
from astraflow.wire.transfers import TransferPlan
from astraflow.wire.weights import PatchIndex, SentChunk


@pytest.fixture
def chunk(tools):
    return tools.chunk_of(0, 100_000)


@pytest.fixture
def plan(tools, chunk):
    index = PatchIndex(patch=tools.patch_of([chunk]), chunk_digests=(bytes(32),))
    return TransferPlan(
        transfer_id="t",
        patches=(index,),
        chunk_count=1,
        payload_nbytes=index.patch.payload_nbytes,
    )


@pytest.fixture
def inbox(plan):
    taking = FrameInbox(stall_timeout_s=5.0)
    taking.take_plan(plan)
    return taking


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
    inbox = FrameInbox(stall_timeout_s=5.0, on_plan=lambda _: arena)
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
