"""A chunk that is not sound is refused, whatever was done to it."""

import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec import dense_planes
from astraflow.codec.chunks import (
    Chunk,
    ChunkHeader,
    Compression,
    Encoding,
    Profile,
    Runs,
    make_chunk,
)
from astraflow.codec.decode import decode_back, decode_change, decode_whole
from astraflow.codec.encode import encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout

COUNT = 12_000
LAYOUT = Layout.of([("w", Dtype.BF16, (COUNT,))])
BASE = np.random.default_rng(1).integers(0, 1 << 16, LAYOUT.nbytes // 2).astype(np.uint16)
BASE[COUNT:] = 0
TARGET = BASE.copy()
TARGET[np.random.default_rng(2).random(len(BASE)) < 0.05] ^= 3
TARGET[COUNT:] = 0
(SPARSE,) = encode_patch(
    Runs(LAYOUT), flat_bits(TARGET.view(np.uint8)), flat_bits(BASE.view(np.uint8)), StateDigest()
).chunks
OLD = BASE[:COUNT]
COMPACT = encode_patch(
    Runs(LAYOUT),
    flat_bits(TARGET.view(np.uint8)),
    flat_bits(BASE.view(np.uint8)),
    StateDigest(),
    profile=Profile.COMPACT,
)
PLANES = make_chunk(
    next(Runs(LAYOUT).ranges()), Encoding.DENSE_PLANES, dense_planes.encode(Dtype.BF16, OLD & 0x3FF)
)
CHUNKS = [(SPARSE, b""), (COMPACT.chunks[0], COMPACT.shared_tables), (PLANES, b"")]


def refusal(chunk, old=OLD, tables=b""):
    with pytest.raises(AstraflowError) as caught:
        decode_change(chunk, old, tables)
    assert caught.value.reason is Reason.CHUNK_INVALID
    return caught.value.message


def with_payload(payload, chunk=SPARSE, **fields):
    header = replace(chunk.header, payload_nbytes=len(payload), **fields)
    return Chunk(header=header, payload=payload)


@settings(max_examples=100)
@given(data=st.data())
def test_a_spoilt_payload_is_refused_or_changes_elements_of_its_range_only(data, level):
    chunk, tables = data.draw(st.sampled_from(CHUNKS))
    payload = bytearray(chunk.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    payload = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    change = None
    with suppress(AstraflowError):
        change = decode_change(with_payload(payload, chunk=chunk), OLD, tables)
    if change is not None:
        assert len(change.positions) == chunk.header.changed_count or not chunk.header.changed_count
        assert (np.diff(change.positions) > 0).all()
        assert change.positions.max() < COUNT
        assert (change.before != change.values).all()


@settings(max_examples=50)
@given(data=st.data())
def test_a_truncated_payload_is_refused(data, level):
    chunk, tables = data.draw(st.sampled_from(CHUNKS))
    cut = bytes(chunk.payload)[: data.draw(st.integers(0, len(chunk.payload) - 1))]
    refusal(with_payload(cut, chunk=chunk), tables=tables)
    refusal(Chunk(header=chunk.header, payload=cut), tables=tables)


@settings(max_examples=10)
@given(more=st.binary(min_size=1, max_size=9))
def test_bytes_after_the_end_are_refused(more, level):
    for chunk, tables in CHUNKS:
        refusal(with_payload(bytes(chunk.payload) + more, chunk=chunk), tables=tables)


@settings(max_examples=50)
@given(payload=st.binary(max_size=200), data=st.data())
def test_noise_is_refused(payload, data, level):
    chunk, tables = data.draw(st.sampled_from(CHUNKS))
    refusal(with_payload(payload, chunk=chunk), tables=tables)


@pytest.mark.parametrize(("chunk", "tables"), CHUNKS[:2])
def test_a_range_cannot_change_more_elements_than_it_has(chunk, tables):
    header = replace(chunk.header, changed_count=2**31)
    assert f"of {COUNT} elements" in refusal(replace(chunk, header=header), tables=tables)


@pytest.mark.parametrize("place", range(4))
def test_a_stream_that_unpacks_to_more_than_it_says_is_refused_unread(place):
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    for stream in (bomb, unsized):
        count = SPARSE.header.changed_count
        nbytes = [count, (count + 7) // 8, (count + 7) // 8, count]
        streams = [bytes(each) for each in nbytes]
        streams[place] = stream
        head = struct.pack("<7I", count, count, 0, *map(len, streams))
        assert "does not unpack to" in refusal(with_payload(head + b"".join(streams)))


def test_gaps_that_say_to_be_longer_than_a_range_can_need_are_refused():
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    head = struct.pack("<7I", 1 << 24, 0, 0, len(frame), 0, 0, 0)

    assert "another size" in refusal(with_payload(head + frame))


def test_a_payload_that_packs_its_own_streams_is_not_packed_again():
    packed = zstandard.ZstdCompressor().compress(bytes(SPARSE.payload))

    assert "packed twice" in refusal(with_payload(packed, compression=Compression.ZSTD))


def test_a_compact_chunk_without_tables_is_refused():
    chunk, _ = CHUNKS[1]

    assert "needs tables for bf16" in refusal(chunk)


@pytest.mark.parametrize(
    ("up", "mark", "steps", "escapes"),
    [
        (0, 1, [0], []),  # marked, and a neighbour all the same
        (1, 1, [255], [0x7FFF]),  # all the way round to where it was
        (0, 1, [255], [0x8000]),  # once round and further
        (0, 1, [255], [254]),  # an escape that needed none
        (2, 0, [], []),  # a bit of no change
        (0, 2, [], []),
        (0, 1, [], []),  # a step too few
        (0, 0, [1], []),  # and one too many
        (0, 1, [1], [256]),
    ],
)
def test_a_change_that_could_be_said_otherwise_is_refused(up, mark, steps, escapes, level):
    head = struct.pack("<7I", 1, len(steps), len(escapes), 1, 1, 1, len(steps))
    streams = bytes([7, up, mark, *steps]) + np.array(escapes, "u2").tobytes()

    refusal(with_payload(head + streams, changed_count=1))


def test_the_longest_way_is_taken(level):
    head = struct.pack("<7I", 1, 1, 1, 1, 1, 1, 1)
    payload = head + bytes([7, 0, 1, 255]) + np.array([0x7FFF], "u2").tobytes()

    change = decode_change(with_payload(payload, changed_count=1), OLD)

    assert change.positions.tolist() == [7]
    assert change.values[0] == (~OLD[7] & 0x7FFF | OLD[7] & 0x8000 ^ 0x8000)


@settings(max_examples=100)
@given(data=st.data())
def test_spoilt_tables_are_refused_or_lead_nowhere_else(data, level):
    chunk, tables = CHUNKS[1]
    spoilt = bytearray(tables)
    spoilt[data.draw(st.integers(0, len(tables) - 1))] ^= data.draw(st.integers(1, 255))
    spoilt = bytes(spoilt[: data.draw(st.integers(0, len(tables)))])
    change = None
    with suppress(AstraflowError):
        change = decode_change(chunk, OLD, spoilt)
    if change is not None:
        assert change.positions.max() < COUNT


def test_a_sparse_chunk_needs_a_base():
    with pytest.raises(AstraflowError, match="needs a base"):
        decode_whole(SPARSE)


def test_a_raw_chunk_of_another_size_than_its_range_is_refused():
    (whole,) = encode_whole(Runs(LAYOUT), flat_bits(TARGET.view(np.uint8)))
    short = Chunk(header=replace(whole.header, payload_nbytes=6), payload=bytes(whole.payload)[:6])

    with pytest.raises(AstraflowError, match="covers 24000 bytes with 6"):
        decode_whole(short)


def test_a_raw_chunk_may_be_packed():
    packed = zstandard.ZstdCompressor().compress(TARGET[:COUNT].tobytes())
    header = ChunkHeader(
        index=0,
        offset=0,
        nbytes=2 * COUNT,
        dtype=Dtype.BF16,
        encoding=Encoding.DENSE,
        compression=Compression.ZSTD,
        payload_nbytes=len(packed),
    )

    assert (decode_whole(Chunk(header=header, payload=packed)) == TARGET[:COUNT]).all()


def test_applying_a_chunk_twice_is_harmless():
    change = decode_change(SPARSE, OLD)
    flat = BASE.view(np.uint8).copy()
    for _ in range(2):
        change.apply(flat)

    assert (flat == TARGET.view(np.uint8)).all()


def test_a_sparse_chunk_leads_back_too():
    indices, before = decode_back(SPARSE, TARGET[:COUNT])
    restored = TARGET[:COUNT].copy()
    restored[indices] = before

    assert (restored == OLD).all()


def test_a_raw_chunk_does_not_lead_back():
    (whole,) = encode_whole(Runs(LAYOUT), flat_bits(TARGET.view(np.uint8)))

    with pytest.raises(AstraflowError, match="does not lead back"):
        decode_back(whole, TARGET[:COUNT])
