"""The state digest follows changes as if it were counted anew, and misses none."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec.changes import Change
from astraflow.codec.chunks import ChunkRange
from astraflow.codec.encode import flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.tensors import Dtype, Layout


def test_the_digest_is_what_the_documentation_says():
    """The formula of docs/weights.md, in Python integers."""
    layout = Layout.of([("a", Dtype.BF16, (2,)), ("b", Dtype.F32, ())])
    flat = np.zeros(layout.nbytes, np.uint8)
    layout.view(flat, "a")[:] = 0x3F80, 0x8000
    layout.view(flat, "b")[...] = 0x7FC00001
    low = high = 0
    for offset, bits in ((0, 0x3F80), (2, 0x8000), (64, 0x7FC00001)):
        mixed = splitmix(offset, bits)
        low += mixed
        mixed ^= mixed >> 33
        mixed = mixed * 0xFF51AFD7ED558CCD % 2**64
        high += mixed ^ mixed >> 29

    digest = StateDigest.of(layout, flat)

    assert digest == StateDigest(low % 2**64, high % 2**64)
    assert digest.to_bytes() == digest.low.to_bytes(8, "little") + digest.high.to_bytes(8, "little")


def splitmix(offset, bits):
    mixed = (offset * 0x9E3779B97F4A7C15 + bits * 0xD6E8FEB86659FD93 + 0x6173747261666C77) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return mixed ^ mixed >> 31


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_one_flipped_bit_anywhere_shows(states, seed, data):
    flat = states.random(np.random.default_rng(seed))
    before = StateDigest.of(states.layout, flat)
    spec = data.draw(st.sampled_from([each for each in states.layout.tensors if each.nbytes]))
    at = spec.offset + data.draw(st.integers(0, spec.nbytes - 1))
    flat[at] ^= 1 << data.draw(st.integers(0, 7))

    assert StateDigest.of(states.layout, flat) != before


def test_two_elements_that_change_places_show():
    layout = Layout.of([("w", Dtype.BF16, (64,))])
    flat = np.arange(64, dtype=np.uint16)
    other = flat.copy()
    other[[3, 9]] = other[[9, 3]]

    assert StateDigest.of(layout, flat.view("u1")) != StateDigest.of(layout, other.view("u1"))


def test_undoing_a_change_brings_the_digest_back_across_many_blocks():
    layout = Layout.of([("w", Dtype.F32, (100_000,))])
    rng = np.random.default_rng(0)
    before, values = rng.integers(0, 2**32, (2, 100_000)).astype(np.uint32)
    indices = np.arange(100_000, dtype=np.uint32)
    change = Change(dtype=Dtype.F32, first=0, indices=indices, before=before, values=values)
    back = Change(dtype=Dtype.F32, first=0, indices=indices, before=values, values=before)
    start = StateDigest.of(layout, before.view(np.uint8))

    assert start.after(change) == StateDigest.of(layout, values.view(np.uint8))
    assert start.after(change).after(back) == start


def test_the_shares_of_a_state_add_up_to_it(states):
    flat = states.random(np.random.default_rng(3))
    whole = StateDigest.of(states.layout, flat)
    pieces = [
        (ChunkRange(offset=s.offset, nbytes=s.nbytes, dtype=s.dtype), flat_bits(flat))
        for s in states.layout.tensors
    ]
    left, right = (
        StateDigest.of_pieces((where, bits(where)) for where, bits in half)
        for half in (pieces[:2], pieces[2:])
    )

    assert left.plus(right) == whole
    assert StateDigest.from_bytes(whole.to_bytes()) == whole
