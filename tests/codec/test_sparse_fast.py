"""Gaps and distances come back as they were, at every width and at every edge."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec import kernels, sparse_fast

WIDTHS = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


def encode(indices, old, new, limit_nbytes=1 << 30):
    if kernels.level() < 0:
        return sparse_fast.streams_of(indices, old[indices], new, limit_nbytes=limit_nbytes)
    whole = old.copy()
    whole[indices] = new
    return sparse_fast.scan(old, whole, first=0, limit_nbytes=limit_nbytes).streams


def round_trip(indices, old, new):
    payload = encode(indices, old, new).payload(old.itemsize)
    found, before, values, _ = sparse_fast.decode(payload, old, changed_count=len(indices))
    assert (before == old[indices]).all()
    return found, values


@settings(max_examples=100)
@given(width=WIDTHS, seed=st.integers(0, 2**32), count=st.integers(1, 3000), data=st.data())
def test_any_change_of_any_bits_comes_back_and_leads_back(width, seed, count, data, level):
    rng = np.random.default_rng(seed)
    top = np.iinfo(width).max
    old = rng.integers(0, top, count, width, endpoint=True)
    changed = data.draw(st.integers(1, count))
    indices = np.sort(rng.choice(count, changed, replace=False)).astype(np.int64)
    step = rng.integers(1, top, changed, width, endpoint=True)
    new = old[indices] ^ step

    found, values = round_trip(indices, old, new)

    assert (found == indices).all()
    assert (values == new).all()
    assert values.dtype == old.dtype
    whole = old.copy()
    whole[indices] = new
    payload = encode(indices, old, new).payload(old.itemsize)
    back, _, before, _ = sparse_fast.decode(payload, whole, changed_count=changed, is_back=True)
    assert (back == indices).all()
    assert (before == old[indices]).all()


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 70_000])
def test_gaps_of_every_size_come_back(gap, level):
    old = np.zeros(3 * gap + 3, np.uint16)
    indices = np.array([gap, 2 * gap + 1, 3 * gap + 2])

    found, _ = round_trip(indices, old, np.ones(3, np.uint16))

    assert (found == indices).all()


@pytest.mark.parametrize(
    ("old", "new", "is_up"),
    [
        (0x3F80, 0x3F81, True),  # 1.0 and the next above
        (0x3F80, 0x3F7F, False),
        (0x8000, 0x0000, True),  # -0 is one below +0
        (0x0000, 0x8000, False),
        (0x8001, 0x8000, True),  # the negative number nearest to zero, and -0
        (0x7F80, 0x7F81, True),  # infinity and the first NaN
    ],
)
def test_neighbours_are_one_unit_apart_across_signs_infinity_and_nan(old, new, is_up, level):
    streams = encode(np.array([0]), np.array([old], "u2"), np.array([new], "u2"))

    assert streams == (b"\0", bytes([is_up]), b"\0", b"", b"")


@pytest.mark.parametrize("steps", [1, 2, 254, 255, 256, 0x7FFE])
@pytest.mark.parametrize("sign", [1, -1])
def test_further_changes_are_marked_and_say_by_how_much(steps, sign, level):
    # Negative numbers, from the least one on: their bits fall as they rise.
    old = np.full(200, 0xFFFF if sign == 1 else 0x8000, "u2")
    new = old.copy()
    new[150:151] -= np.array([sign * (steps + 1)]).astype("u2")

    streams = encode(np.array([150]), old, new[[150]])

    escapes = np.array([steps] * (steps >= 255), "u2").tobytes()
    ups = bytes([sign == 1])
    assert streams == (bytes([150]), ups, b"\1", bytes([min(steps, 255)]), escapes)
    found, values = round_trip(np.array([150]), old, new[[150]])
    assert (found.tolist(), values.tolist()) == ([150], [new[150]])


def test_streams_beyond_the_limit_are_not_made(level):
    indices = np.arange(100)
    old, new = np.zeros(100, np.uint32), np.full(100, 1 << 20, np.uint32)
    streams = encode(indices, old, new)
    size = streams.nbytes

    assert size == 100 + 13 + 13 + 100 + 400
    assert encode(indices, old, new, size) is not None
    assert encode(indices, old, new, size - 1) is None


def test_streams_are_packed_each_on_its_own():
    rng = np.random.default_rng(0)
    old = np.zeros(200_000, np.uint16)
    indices = np.sort(rng.choice(len(old), 4000, replace=False))
    streams = encode(indices, old, np.ones(4000, np.uint16))

    payload = streams.payload(old.itemsize)

    packed = struct.unpack_from("<4I", payload, 12)
    assert packed[0] == len(streams.gaps)  # not an eighth shorter
    assert max(packed[1:3]) < 40  # 4,000 equal bits
    assert len(payload) < 28 + packed[0] + 2 * 40


def test_a_decoded_change_may_end_with_the_last_element(level):
    old = np.arange(64 * 3, dtype=np.uint16)
    for count in (64, 128, 129, 192):
        indices = np.arange(len(old))[-count:]
        found, values = round_trip(indices, old, old[indices] ^ 1)
        assert (found == indices).all()
        assert (values == old[indices] ^ 1).all()
