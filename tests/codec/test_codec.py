"""The codec is lossless, canonical, and refuses what is not sound."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec.chunks import CHUNK_NBYTES, Chunk, Encoding, check_header, ranges_of
from astraflow.codec.decode import decode_chunk
from astraflow.codec.encode import encode_patch
from astraflow.codec.state_digest import StateDigest
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout

LAYOUT = Layout.of(
    [(f"t{number:02}.{dtype}", dtype, (37 + number,)) for number, dtype in enumerate(Dtype)]
)


def apply(layout, chunks, base):
    flat = np.zeros(layout.nbytes, np.uint8) if base is None else base.copy()
    for chunk in chunks:
        check_header(chunk.header, layout)
        change = decode_chunk(chunk, base)
        if change is not None:
            flat.view(change.dtype.bits)[change.positions] = change.values
    return flat


def random_state(layout, rng):
    flat = np.zeros(layout.nbytes, np.uint8)
    for spec in layout.tensors:
        part = flat[spec.offset : spec.offset + spec.nbytes]
        part[:] = rng.integers(0, 256, spec.nbytes, np.uint8)
    return flat


def touched(layout, flat, rng, share):
    new = flat.copy()
    for spec in layout.tensors:
        bits = layout.view(new, spec.name)
        chosen = rng.random(bits.shape) < share
        bits[chosen] = rng.integers(0, 1 << 8 * spec.dtype.itemsize, chosen.sum(), np.uint64).astype(
            spec.dtype.bits
        )
    return new


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0, 0.01, 0.1, 0.5, 1]))
def test_a_patch_gives_the_target_bit_by_bit_for_every_dtype(seed, share):
    rng = np.random.default_rng(seed)
    base = random_state(LAYOUT, rng)
    target = touched(LAYOUT, base, rng, share)
    chunks = encode_patch(LAYOUT, target, base)
    assert chunks == encode_patch(LAYOUT, target, base)
    assert (apply(LAYOUT, chunks, base) == target).all()
    assert (apply(LAYOUT, encode_patch(LAYOUT, target, None), None) == target).all()


def test_steps_of_one_unit_in_the_last_place_are_small_across_zero_and_nan():
    layout = Layout.of([("w", Dtype.BF16, (1 << 14,))])
    base = np.arange(1 << 14, dtype=np.uint16) * 4
    target = base.copy()
    target[::7] += 1
    (chunk,) = encode_patch(layout, target.view(np.uint8), base.view(np.uint8))
    assert chunk.header.encoding is Encoding.SPARSE_FAST
    assert chunk.header.changed_count == len(target[::7])
    assert len(chunk.payload) < 64  # two constant streams
    assert (apply(layout, [chunk], base.view(np.uint8)) == target.view(np.uint8)).all()


def test_what_does_not_change_costs_one_header():
    layout = Layout.of([(f"expert{n}", Dtype.BF16, (CHUNK_NBYTES // 4,)) for n in range(8)])
    flat = np.zeros(layout.nbytes, np.uint8)
    (chunk,) = encode_patch(layout, flat, flat)
    assert (chunk.header.encoding, chunk.header.nbytes) == (Encoding.UNCHANGED, layout.nbytes)


def test_ranges_cover_the_layout_and_never_cross_a_dtype():
    ranges = list(ranges_of(LAYOUT))
    for spec in LAYOUT.tensors:
        inside = [r for r in ranges if r.offset <= spec.offset < r.offset + r.nbytes]
        assert [r.dtype for r in inside] == [spec.dtype]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_broken_payload_is_refused_or_harmless_never_a_crash(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    layout = Layout.of([("w", Dtype.BF16, (4000,))])
    base = random_state(layout, rng)
    (chunk,) = encode_patch(layout, touched(layout, base, rng, 0.05), base)
    payload = bytearray(chunk.payload)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    payload = payload[: data.draw(st.integers(0, len(payload)))]
    header = replace(chunk.header, payload_nbytes=len(payload))
    try:
        change = decode_chunk(Chunk(header=header, payload=bytes(payload)), base)
    except AstraflowError as error:
        assert error.reason is Reason.CHUNK_INVALID
    else:
        assert change is None or change.positions.max(initial=0) < 4000


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 1},
        {"offset": 1 << 40},
        {"nbytes": 3},
        {"changed_count": 4001},
        {"payload_nbytes": CHUNK_NBYTES + 1},
        {"dtype": Dtype.F32},
    ],
)
def test_a_header_that_cannot_be_true_is_refused(lie):
    layout = Layout.of([("w", Dtype.BF16, (4000,))])
    (chunk,) = encode_patch(layout, np.ones(layout.nbytes, np.uint8), None)
    with pytest.raises(AstraflowError, match="CHUNK_INVALID"):
        check_header(replace(chunk.header, **lie), layout)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_state_digest_follows_changes_as_if_it_were_counted_anew(seed):
    rng = np.random.default_rng(seed)
    base = random_state(LAYOUT, rng)
    target = touched(LAYOUT, base, rng, 0.3)
    changes = [decode_chunk(chunk, base) for chunk in encode_patch(LAYOUT, target, base)]
    pairs = [(c, base.view(c.dtype.bits)[c.positions]) for c in changes if c is not None]
    followed = StateDigest.of(LAYOUT, base).changed(pairs)
    assert followed == StateDigest.of(LAYOUT, target)
    assert (followed == StateDigest.of(LAYOUT, base)) is bool((base == target).all())
