"""Frames of one transfer: in any order, in parts, and with lies in them."""

from dataclasses import replace

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.transport.assembly import UNPLANNED_NBYTES, FrameInbox
from astraflow.transport.frames import (
    Frame,
    FrameKind,
    chunk_frames,
    failure_frame,
    pack,
    plan_parts,
    unpack,
)
from astraflow.wire.transfers import TransferPlan
from astraflow.wire.weights import PatchIndex, SentChunk


@pytest.fixture
def chunks(tools):
    return [tools.chunk_of(index, size) for index, size in enumerate([0, 1000, 200_000])]


@pytest.fixture
def plan(tools, chunks):
    patch = tools.patch_of(chunks)
    index = PatchIndex(patch=patch, chunk_digests=(bytes(32),) * len(chunks))
    return TransferPlan(
        patches=(index,),
        chunk_count=len(chunks),
        payload_nbytes=patch.payload_nbytes,
    )


@pytest.fixture
def inbox():
    return FrameInbox(stall_timeout_s=5.0)


def frames_of(chunks, segment_nbytes=4096):
    return [
        each
        for chunk in chunks
        for each in chunk_frames(SentChunk(patch_index=0, chunk=chunk), segment_nbytes)
    ]


def take(inbox, frame, body=b""):
    place = inbox.place(unpack(pack(frame)))
    place[:] = body
    inbox.filled(frame, place)


def refused(inbox, frame, body=b""):
    with pytest.raises(AstraflowError) as caught:
        take(inbox, frame, body)
    assert caught.value.reason is Reason.CHUNK_INVALID


async def test_parts_come_in_any_order_and_before_the_plan(inbox, plan, chunks):
    for frame, body in reversed(frames_of(chunks)):
        take(inbox, frame, body)
    for header, body in plan_parts(plan, 50):
        take(inbox, unpack(header), body)

    first, *rest = [item async for item in inbox.items()]

    assert first == plan
    assert {each.chunk.header.index: bytes(each.chunk.payload) for each in rest} == {
        each.header.index: each.payload for each in chunks
    }
    assert inbox.is_over


async def test_a_plan_that_is_behind_much_else_is_not_held_up(tools):
    many = [tools.chunk_of(index, 4 << 20) for index in range(10)]
    held = []
    inbox = FrameInbox(stall_timeout_s=5.0, on_pressure=held.append)
    for frame, body in frames_of(many, 4 << 20):
        take(inbox, frame, body)
    assert not held

    patch = tools.patch_of(many)
    index = PatchIndex(patch=patch, chunk_digests=(bytes(32),) * len(many))
    inbox.take_plan(
        TransferPlan(patches=(index,), chunk_count=len(many), payload_nbytes=patch.payload_nbytes)
    )
    assert held == [True]
    assert len([item async for item in inbox.items()]) == 1 + len(many)
    assert held == [True, False]


async def test_a_failure_of_the_source_comes_out_as_it_was_raised(inbox):
    raised = AstraflowError(Reason.VERSION_EVICTED, "gone", metadata={"version": "3"})
    header, body = failure_frame(raised)
    take(inbox, unpack(header), body)

    with pytest.raises(AstraflowError) as caught:
        [item async for item in inbox.items()]
    assert caught.value.to_failure() == raised.to_failure()


async def test_a_body_that_comes_after_a_failure_means_nothing(inbox, chunks):
    frame, body = frames_of(chunks)[1]
    target = inbox.place(frame)
    target[:] = body
    inbox.fail(AstraflowError(Reason.VERSION_EVICTED, "gone"))
    inbox.filled(frame, target)
    with pytest.raises(AstraflowError, match="gone"):
        await anext(inbox.items())


async def test_lies_are_refused_before_memory_is_given(inbox, plan, chunks):
    inbox.take_plan(plan)
    (frame, body), *_ = frames_of(chunks[2:])

    refused(inbox, replace(frame, patch_index=1))
    refused(inbox, replace(frame, header=replace(frame.header, index=3)))
    refused(inbox, replace(frame, body_offset=frame.payload_nbytes - 1))
    refused(inbox, replace(frame, body_nbytes=frame.payload_nbytes + 1))
    take(inbox, frame, body)
    refused(inbox, replace(frame, header=replace(frame.header, offset=64)))
    refused(inbox, Frame(kind=FrameKind.REQUEST, body_nbytes=0))
    refused(inbox, Frame(kind=FrameKind.FAILURE, body_nbytes=1 << 20))
    refused(inbox, Frame(kind=FrameKind.PLAN, body_nbytes=9, payload_nbytes=1 << 30))
    with pytest.raises(AstraflowError, match="one plan"):
        inbox.take_plan(plan)


async def test_before_the_plan_memory_is_bounded_too(inbox, tools):
    header = replace(tools.chunk_of(0, 1).header, payload_nbytes=4 << 20)
    frame = Frame(kind=FrameKind.CHUNK, body_nbytes=4096, payload_nbytes=4 << 20)
    last = UNPLANNED_NBYTES >> 22
    for index in range(last):
        inbox.place(replace(frame, header=replace(header, index=index)))

    with pytest.raises(AstraflowError, match="more chunks or bytes"):
        inbox.place(replace(frame, header=replace(header, index=last)))


@pytest.mark.parametrize(
    ("at", "byte"), [(0, 0), (4, 0), (4, 9), (5, 0), (6, 77), (19, 255), (31, 255), (39, 255)]
)
def test_headers_of_no_sound_peer_are_refused(tools, at, byte):
    (frame, _), *_ = frames_of([tools.chunk_of(1, 100)])
    data = bytearray(pack(frame))
    assert unpack(data) == frame
    data[at] = byte

    with pytest.raises(AstraflowError) as caught:
        unpack(data)
    assert caught.value.reason is Reason.CHUNK_INVALID
