"""Gaps within classes of the base's exponent come back, the same at every level, for any bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec import kernels, sparse_compact
from astraflow.codec.chunks import Encoding, Profile, Runs
from astraflow.codec.decode import decode_change
from astraflow.codec.encode import encode_chunk, encode_patch, flat_bits
from astraflow.codec.shared_tables import (
    ClassRule,
    ClassTables,
    field_of,
    read_shared_tables,
    rule_for,
    write_shared_tables,
)
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Dtype, Layout


def draw(seed, dtype, count, share):
    rng = np.random.default_rng(seed)
    top = 2 ** (8 * dtype.itemsize) - 1
    old = rng.integers(0, top, count, np.uint64, endpoint=True).astype(dtype.bits)
    new = old.copy()
    near, far = (rng.random(count) < share / 2 for _ in range(2))
    new[near] += rng.choice([1, -1], int(near.sum())).astype(dtype.bits)
    new[far] = rng.integers(0, top, int(far.sum()), np.uint64, endpoint=True).astype(dtype.bits)
    return old, new


def content(scanned):
    counts, tokens = scanned.counts.tolist(), scanned.tokens.tobytes()
    sums = (scanned.low, scanned.high)
    return counts, tokens, scanned.low_bits, scanned.histogram.tolist(), sums


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(list(Dtype)),
    count=st.integers(1, 5000),
    share=st.sampled_from([0.001, 0.05, 0.5, 1]),
    low=st.integers(0, 200),
    class_count=st.integers(1, 16),
)
def test_every_level_finds_the_same_and_brings_it_back(seed, dtype, count, share, low, class_count):
    old, new = draw(seed, dtype, count, share)
    rule = ClassRule(dtype=dtype, low=min(low, field_of(dtype)[1]), class_count=class_count)
    found, payloads = [], []
    for level in kernels.levels():
        with kernels.forced(level):
            scanned = sparse_compact.scan(rule, old, new, first=64)
            tables = ClassTables.of(rule, scanned.histogram)
            payload = sparse_compact.encode(scanned, tables)
            changed = np.flatnonzero(old != new)
            back = sparse_compact.decode(payload, old, tables, changed_count=len(changed))
        found.append(content(scanned))
        payloads.append(payload)
        assert (back[0] == changed).all()
        assert (back[1] == old[changed]).all()
        assert (back[2] == new[changed]).all()

    assert all(each == found[0] for each in found)
    assert all(each == payloads[0] for each in payloads)


def weights(count, share, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, count).astype(np.float32)
    old = (values.view(np.uint32) >> 16).astype(np.uint16)
    # The finer a value, the likelier it is to change.
    odds = share * 0.5 * 2.0 ** (122 - np.clip(old >> 7 & 255, 110, 130).astype(float))
    new = old.copy()
    new[rng.random(count) < odds] += 1
    return old, new


def encoded(old, new, profile, dtype=Dtype.BF16):
    layout = Layout.of([("w", dtype, old.shape)])
    bits = [flat_bits(each.view(np.uint8)) for each in (new, old)]
    return encode_patch(Runs(layout), *bits, StateDigest(), profile=profile)


def test_a_patch_of_small_steps_is_smaller_than_a_fast_one_and_says_the_same(level):
    old, new = weights(1 << 20, 0.01)

    fast, compact = (encoded(old, new, profile) for profile in Profile)

    (chunk,) = compact.chunks
    assert chunk.header.encoding is Encoding.SPARSE_COMPACT
    assert len(chunk.payload) < 0.8 * len(fast.chunks[0].payload)
    assert compact.digest == fast.digest
    change = decode_change(chunk, old, compact.shared_tables)
    assert (change.values == new[change.positions]).all()


@pytest.mark.parametrize("share", [1e-4, 1e-3, 0.1, 0.5, 0.52, 0.7, 0.85])
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F32])
def test_at_any_share_of_changes_a_compact_patch_is_no_larger_than_a_fast_one(dtype, share):
    old, new = stepped(dtype, share)

    assert nbytes(old, new, Profile.COMPACT, dtype) <= 1.02 * nbytes(old, new, Profile.FAST, dtype)


def stepped(dtype, share):
    """Weights of which a share moves by a unit or some: a matrix, and rows of an embedding."""
    rng, count = np.random.default_rng(7), 1 << 18
    old = rng.normal(0, 0.02, 2 * count).astype(np.float32).view(np.uint32)
    old = (old >> 16).astype(dtype.bits) if dtype is Dtype.BF16 else old
    steps = rng.geometric(0.7, 2 * count).astype(dtype.bits)
    is_moved = rng.random(2 * count) < share
    is_moved[count:] = np.repeat(rng.random(count // 256) < share, 256)
    return old, np.where(is_moved, old + steps, old).astype(dtype.bits)


def nbytes(old, new, profile, dtype):
    patch = encoded(old, new, profile, dtype)
    return sum(len(chunk.payload) for chunk in patch.chunks) + len(patch.shared_tables)


def test_what_repeats_is_coded_fast_in_a_compact_patch_too(level):
    """One column of a matrix: Zstandard finds the period, tables do not."""
    old, new = weights(1 << 20, 0.01)
    new[1 << 19 :] = old[1 << 19 :]
    new[1 << 19 :: 64] += 1
    halves = Layout.of(
        [("a", Dtype.BF16, (1 << 19,)), ("b", Dtype.F32, ()), ("c", Dtype.BF16, (1 << 19,))]
    )
    flats = [np.zeros(halves.nbytes, np.uint8) for _ in range(2)]
    for flat, bits in zip(flats, (new, old), strict=True):
        halves.view(flat, "a")[:], halves.view(flat, "c")[:] = np.split(bits, 2)

    patch = encode_patch(
        Runs(halves), *map(flat_bits, flats), StateDigest(), profile=Profile.COMPACT
    )

    assert [chunk.header.encoding for chunk in patch.chunks] == [
        Encoding.SPARSE_COMPACT,
        Encoding.UNCHANGED,
        Encoding.SPARSE_FAST,
    ]
    assert len(patch.chunks[2].payload) < 2000


def test_few_changes_are_coded_as_the_fast_profile_does_because_tables_would_cost_more(level):
    old, new = weights(4096, 0.005)

    fast, compact = (encoded(old, new, profile) for profile in Profile)

    assert compact.shared_tables == b""
    assert bytes(compact.chunks[0].payload) == bytes(fast.chunks[0].payload)


def test_a_range_that_changed_all_over_is_coded_whole_and_is_in_no_table(level):
    layout = Layout.of([("a", Dtype.BF16, (1 << 19,)), ("b", Dtype.F16, (1 << 15,))])
    old, new = np.zeros((2, layout.nbytes), np.uint8)
    layout.view(old, "a")[:], layout.view(new, "a")[:] = weights(1 << 19, 0.02)
    values = np.random.default_rng(1).normal(0, 0.02, (2, 1 << 15)).astype(np.float16)
    layout.view(old, "b")[:], layout.view(new, "b")[:] = values.view(np.uint16)
    bits = (flat_bits(new), flat_bits(old))

    patch = encode_patch(Runs(layout), *bits, StateDigest(), profile=Profile.COMPACT)

    assert [chunk.header.encoding for chunk in patch.chunks] == [
        Encoding.SPARSE_COMPACT,
        Encoding.DENSE_PLANES,
    ]
    sections = read_shared_tables(patch.shared_tables)
    assert not sections[Dtype.F16].tables.frequencies.any()
    change = decode_change(patch.chunks[1], layout.view(old, "b"), patch.shared_tables)
    assert (change.values == layout.view(new, "b")[change.positions - (1 << 19)]).all()


def test_a_chunk_that_is_encoded_alone_has_the_bytes_that_it_had_in_the_patch(level):
    old, new = weights((2 << 20) + 30_001, 0.01)
    patch = encoded(old, new, Profile.COMPACT)
    runs = Runs(Layout.of([("w", Dtype.BF16, old.shape)]))

    for where, chunk in zip(runs.ranges(), patch.chunks, strict=True):
        part = slice(where.first, where.first + where.element_count)
        tables = patch.shared_tables
        alone = encode_chunk(where, new[part], old[part], profile=Profile.COMPACT, tables=tables)
        assert bytes(alone.payload) == bytes(chunk.payload)


def test_tables_come_back_and_say_which_classes_there_are(level):
    old, new = weights(1 << 19, 0.02)
    data = encoded(old, new, Profile.COMPACT).shared_tables

    section = read_shared_tables(data)[Dtype.BF16]

    assert write_shared_tables([section]) == data
    rows = section.tables.frequencies.astype(int).sum(1)
    assert set(rows[: section.rule.class_count]) <= {0, 4096}


@pytest.mark.parametrize(
    "data", [b"\0", b"\1", b"\1\4bf16", b"\1\4bf99\0\0\1\0\0\0\0", b"\1\4bf16\0\0\x11\0\0"]
)
def test_tables_that_are_none_are_refused(data):
    with pytest.raises(AstraflowError, match="tables of a patch"):
        read_shared_tables(data)


def test_classes_start_where_changes_begin_to_be_frequent():
    histogram = np.zeros(256, np.int64)
    histogram[100:120] = 1000
    histogram[130] = 1

    rule = rule_for(Dtype.BF16, histogram, 20_001)

    assert (rule.low, rule.class_count) == (119 - 15, 16)
    assert rule_for(Dtype.BF16, histogram, 500) is None
    assert rule_for(Dtype.U8, np.array([100]), 20_000).class_count == 1
