"""A chunk that is not sound is refused, whatever was done to it."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from astraflow.codec.chunks import Chunk, ChunkHeader, Compression, Encoding
from astraflow.codec.decode import decode_back, decode_change, decode_whole
from astraflow.codec.encode import encode_patch, encode_whole, flat_bits
from astraflow.codec.runs import Runs
from astraflow.codec.state_digest import StateDigest
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout

COUNT = 4000
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


def refusal(chunk, old=OLD):
    with pytest.raises(AstraflowError) as caught:
        decode_change(chunk, old)
    assert caught.value.reason is Reason.CHUNK_INVALID
    return caught.value.message


def with_payload(payload, **fields):
    header = replace(SPARSE.header, payload_nbytes=len(payload), **fields)
    return Chunk(header=header, payload=payload)


def raw():
    return zstandard.ZstdDecompressor().decompress(SPARSE.payload)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_spoilt_payload_is_refused_or_changes_elements_of_its_range_only(data):
    payload = bytearray(data.draw(st.sampled_from([bytes(SPARSE.payload), raw()])))
    compression = Compression.NONE if payload == raw() else Compression.ZSTD
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    payload = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    change = None
    with suppress(AstraflowError):
        change = decode_change(with_payload(payload, compression=compression), OLD)
    if change is not None:
        assert len(change.positions) == SPARSE.header.changed_count
        assert change.positions.max() < COUNT
        assert (change.before != change.values).all()


@given(cut=st.integers(0, len(SPARSE.payload) - 1))
def test_a_truncated_payload_is_refused(cut):
    refusal(with_payload(bytes(SPARSE.payload)[:cut]))
    refusal(Chunk(header=SPARSE.header, payload=bytes(SPARSE.payload)[:cut]))


@given(cut=st.integers(0, len(raw()) - 1))
def test_a_truncated_stream_is_refused(cut):
    refusal(with_payload(raw()[:cut], compression=Compression.NONE))


@given(more=st.binary(min_size=1, max_size=9))
def test_bytes_after_the_end_are_refused(more):
    refusal(with_payload(bytes(SPARSE.payload) + more))
    refusal(with_payload(raw() + more, compression=Compression.NONE))


@settings(max_examples=100, deadline=None)
@given(payload=st.binary(max_size=200), data=st.data())
def test_noise_is_refused(payload, data):
    assume(payload != raw())
    compression = data.draw(st.sampled_from(Compression))
    refusal(with_payload(payload, compression=compression))


def test_a_frame_that_unpacks_to_more_than_a_range_can_need_is_refused_unread():
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    assert "unpacks to more than" in refusal(with_payload(bomb))

    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(raw())
    assert "unpacks to more than" in refusal(with_payload(unsized))


def test_an_encoding_of_another_profile_is_refused():
    chunk = with_payload(b"x", encoding=Encoding.SPARSE_COMPACT, compression=Compression.NONE)
    assert "not known here" in refusal(chunk)


def test_a_change_that_changes_nothing_is_refused():
    stream = bytearray(raw())
    gap_nbytes = int.from_bytes(stream[:4], "little")
    stream[8 + gap_nbytes] = 0

    assert "not canonical" in refusal(with_payload(bytes(stream), compression=Compression.NONE))


def test_a_sparse_chunk_needs_a_base():
    with pytest.raises(AstraflowError, match="needs a base"):
        decode_whole(SPARSE)


def test_a_raw_chunk_of_another_size_than_its_range_is_refused():
    (whole,) = encode_whole(Runs(LAYOUT), flat_bits(TARGET.view(np.uint8))).chunks
    short = Chunk(header=replace(whole.header, payload_nbytes=6), payload=bytes(whole.payload)[:6])

    with pytest.raises(AstraflowError, match="covers 8000 bytes with 6"):
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
    (whole,) = encode_whole(Runs(LAYOUT), flat_bits(TARGET.view(np.uint8))).chunks

    with pytest.raises(AstraflowError, match="does not lead back"):
        decode_back(whole, TARGET[:COUNT])
