"""Gaps and distances come back as they were, at every width and at every edge."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec import sparse_fast

WIDTHS = st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64])


def round_trip(indices, old, new, count):
    payload = sparse_fast.encode(indices, old[indices], new, limit_nbytes=1 << 30)
    assert len(payload) <= sparse_fast.largest_nbytes(count, old.itemsize)
    return sparse_fast.decode(payload, old, changed_count=len(indices))


@settings(max_examples=100, deadline=None)
@given(width=WIDTHS, seed=st.integers(0, 2**32), count=st.integers(1, 3000), data=st.data())
def test_any_change_of_any_bits_comes_back(width, seed, count, data):
    rng = np.random.default_rng(seed)
    top = np.iinfo(width).max
    old = rng.integers(0, top, count, width, endpoint=True)
    changed = data.draw(st.integers(1, count))
    indices = np.sort(rng.choice(count, changed, replace=False)).astype(np.int64)
    step = rng.integers(1, top, changed, width, endpoint=True)
    new = old[indices] ^ step

    found, values = round_trip(indices, old, new, count)

    assert (found == indices).all()
    assert (values == new).all()
    assert values.dtype == old.dtype


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 70_000])
def test_gaps_of_every_size_come_back(gap):
    old = np.zeros(3 * gap + 3, np.uint16)
    indices = np.array([gap, 2 * gap + 1, 3 * gap + 2])

    found, _ = round_trip(indices, old, np.ones(3, np.uint16), len(old))

    assert (found == indices).all()


@pytest.mark.parametrize(
    ("old", "new", "distance"),
    [
        (0x3F80, 0x3F81, 2),  # 1.0 and the next above
        (0x3F80, 0x3F7F, 1),
        (0x8000, 0x0000, 2),  # -0 is one below +0
        (0x0000, 0x8000, 1),
        (0x8001, 0x8000, 2),  # the negative number nearest to zero, and -0
        (0x7F80, 0x7F81, 2),  # infinity and the first NaN
    ],
)
def test_neighbours_are_one_unit_apart_across_signs_infinity_and_nan(old, new, distance):
    payload = sparse_fast.encode(
        np.array([0]), np.array([old], "u2"), np.array([new], "u2"), limit_nbytes=100
    )

    assert payload[-1] == distance


def test_a_payload_beyond_the_limit_is_not_made():
    indices = np.arange(100)
    old, new = np.zeros(100, np.uint32), np.full(100, 1 << 20, np.uint32)
    size = len(sparse_fast.encode(indices, old, new, limit_nbytes=1000))

    assert sparse_fast.encode(indices, old, new, limit_nbytes=size) is not None
    assert sparse_fast.encode(indices, old, new, limit_nbytes=size - 1) is None
