"""Two versions become chunks and back, bit by bit, always with the same bytes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec.chunks import CHUNK_NBYTES, Compression, Encoding, Profile, Runs
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.encode import encode_chunk, encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.tensors import Dtype, Layout

SHARES = st.sampled_from([0, 0.01, 0.1, 0.5, 1])


def applied(runs, patch, base):
    flat = base.copy()
    for chunk in patch.chunks:
        runs.check(chunk.header)
        old = base[chunk.header.offset : chunk.header.end].view(chunk.header.dtype.bits)
        change = decode_change(chunk, old, patch.shared_tables)
        if change is not None:
            assert (change.before != change.values).all()
            change.apply(flat)
    runs.check_cover([chunk.header for chunk in patch.chunks])
    return flat


def content(chunks):
    return [(chunk.header, bytes(chunk.payload)) for chunk in chunks]


def patch(layout, target, base):
    target, base = target.view(np.uint8), base.view(np.uint8)
    return encode_patch(Runs(layout), flat_bits(target), flat_bits(base), StateDigest())


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), share=SHARES, profile=st.sampled_from(Profile))
def test_a_patch_gives_the_target_bit_by_bit_for_every_dtype(states, seed, share, profile, level):
    rng = np.random.default_rng(seed)
    base = states.random(rng)
    target = states.touched(base, rng, share)
    start = StateDigest.of(states.layout, base)

    patch = encode_patch(states.runs, flat_bits(target), flat_bits(base), start, profile=profile)

    assert (applied(states.runs, patch, base) == target).all()
    assert patch.digest == StateDigest.of(states.layout, target)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), profile=st.sampled_from(Profile))
def test_a_whole_version_comes_back_bit_by_bit(states, seed, profile, level):
    target = states.random(np.random.default_rng(seed))
    flat = np.zeros_like(target)

    chunks = encode_whole(states.runs, flat_bits(target), profile=profile)

    for chunk in chunks:
        states.runs.check(chunk.header)
        part = flat[chunk.header.offset : chunk.header.end]
        part.view(chunk.header.dtype.bits)[:] = decode_whole(chunk)
    assert (flat == target).all()


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), share=SHARES)
def test_the_same_two_versions_give_the_same_bytes(states, seed, share):
    rng = np.random.default_rng(seed)
    base = states.random(rng)
    target = states.touched(base, rng, share)
    first, again = (
        encode_patch(
            states.runs, flat_bits(target.copy()), flat_bits(base.copy()), StateDigest()
        ).chunks
        for _ in range(2)
    )

    assert content(first) == content(again)


def test_the_byte_format_is_what_the_documentation_says():
    """Worked example of docs/codec.md; a change of these bytes needs a new codec version."""
    layout = Layout.of([("w", Dtype.BF16, (512,))])
    base = np.full(512, 0x3F80, np.uint16)
    target = base.copy()
    target[[2, 3, 300, 511]] = 0x3F81, 0x3F7F, 0xBF80, 0x3F82

    (chunk,) = patch(layout, target, base).chunks

    assert chunk.header.encoding is Encoding.SPARSE_FAST
    assert chunk.header.compression is Compression.NONE
    assert bytes(chunk.payload).hex() == (
        "05000000 02000000 01000000"  # bytes of gaps, steps, escapes
        "05000000 01000000 01000000 02000000"  # gaps, ups, marks and steps as sent
        "02 00 ff29 d2"  # 2, 0, 255 + 41, 210 unchanged elements before each
        "09"  # up, down, down, up: 1001
        "0c"  # the last two by more than one unit in the last place: 1100
        "ff 01"  # by how many more: escaped, 1
        "007f"  # 0xbf80 is 32,513 units below 0x3f80: 32,512 more than one
    ).replace(" ", "")


def test_what_does_not_change_costs_one_header():
    layout = Layout.of([(f"expert{n}", Dtype.BF16, (CHUNK_NBYTES // 4,)) for n in range(8)])
    flat = np.zeros(layout.nbytes, np.uint8)

    (chunk,) = patch(layout, flat, flat).chunks

    assert (chunk.header.encoding, chunk.header.nbytes) == (Encoding.UNCHANGED, layout.nbytes)
    assert not chunk.payload


def test_a_change_in_one_range_leaves_its_neighbours_without_payload():
    layout = Layout.of([("w", Dtype.F32, (5 * CHUNK_NBYTES // 4,))])
    base = np.zeros(layout.nbytes, np.uint8)
    target = base.copy()
    target[2 * CHUNK_NBYTES + 8] = 1

    encoded = patch(layout, target, base)
    chunks = encoded.chunks

    assert [chunk.header.encoding for chunk in chunks] == [
        Encoding.UNCHANGED,
        Encoding.SPARSE_FAST,
        Encoding.UNCHANGED,
    ]
    assert [chunk.header.index for chunk in chunks] == [0, 1, 2]
    assert (applied(Runs(layout), encoded, base) == target).all()


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F32, Dtype.U8, Dtype.F64])
def test_noise_is_sent_raw(dtype):
    layout = Layout.of([("w", dtype, (4096,))])
    rng = np.random.default_rng(0)
    base, target = rng.integers(0, 256, (2, layout.nbytes)).astype(np.uint8)

    (chunk,) = patch(layout, target, base).chunks

    assert chunk.header.encoding is Encoding.DENSE
    assert bytes(chunk.payload) == target.tobytes()


def test_small_steps_of_one_percent_cost_about_a_byte_and_a_half_each():
    layout = Layout.of([("w", Dtype.BF16, (1 << 20,))])
    rng = np.random.default_rng(0)
    base = (rng.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    target = base.copy()
    target[rng.random(len(base)) < 0.01] += 1

    (chunk,) = patch(layout, target, base).chunks

    assert len(chunk.payload) / chunk.header.changed_count < 1.5


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), share=SHARES)
def test_a_chunk_that_is_encoded_alone_has_the_payload_that_it_had_in_the_patch(
    states, seed, share
):
    rng = np.random.default_rng(seed)
    base = states.random(rng)
    target = states.touched(base, rng, share)
    new, old = flat_bits(target), flat_bits(base)
    patch = {c.header.offset: c for c in encode_patch(states.runs, new, old, StateDigest()).chunks}
    whole = {c.header.offset: c for c in encode_whole(states.runs, new)}

    for where in states.runs.ranges():
        alone = encode_chunk(where, new(where), old(where))
        if alone.header.encoding is not Encoding.UNCHANGED:
            assert alone.payload == patch[where.offset].payload
        assert encode_chunk(where, new(where), None).payload == whole[where.offset].payload


@pytest.mark.parametrize("profile", Profile)
def test_threads_give_the_same_patch_and_the_same_changes(states, profile):
    layout = Layout.of([("w", Dtype.BF16, (CHUNK_NBYTES // 2 * 3 + 7,)), ("x", Dtype.F32, (900,))])
    rng, runs = np.random.default_rng(5), Runs(layout)
    base = states.random(rng, layout)
    target = states.touched(base, rng, 0.001, layout)
    given = (runs, flat_bits(target), flat_bits(base), StateDigest.of(layout, base))

    one, many = (encode_patch(*given, profile=profile, thread_count=n) for n in (1, 4))

    assert content(many.chunks) == content(one.chunks)
    assert (many.shared_tables, many.digest) == (one.shared_tables, one.digest)
    digest, state = given[-1], base.copy()

    def old(header):
        return base[header.offset : header.end].view(header.dtype.bits)

    for chunk in many.chunks:
        change = decode_change(chunk, old(chunk.header), many.shared_tables)
        if change is None:
            continue
        assert digest.after(change) == digest.after(replace(change, sums=None))
        digest = digest.after(change)
        change.apply(state)
    assert digest == one.digest
    assert (state == target).all()
