"""Chunks keep to runs of tensors of one dtype, and together cover the layout."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.codec.chunks import CHUNK_NBYTES, Compression, Encoding, Runs
from astraflow.codec.encode import encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Dtype, Layout

LAYOUT = Layout.of(
    [
        ("a", Dtype.BF16, (300, 40)),
        ("b", Dtype.BF16, (3,)),
        ("c", Dtype.F32, (77,)),
        ("d", Dtype.BF16, (CHUNK_NBYTES,)),
        ("e", Dtype.F32, (0,)),
    ]
)
RUNS = Runs(LAYOUT)


def headers(share=0.01):
    rng = np.random.default_rng(0)
    base = np.zeros(LAYOUT.nbytes, np.uint8)
    target = base.copy()
    for spec in LAYOUT.tensors:
        bits = LAYOUT.view(target, spec.name)
        bits[rng.random(bits.shape) < share] = 1
    chunks = encode_patch(RUNS, flat_bits(target), flat_bits(base), StateDigest()).chunks
    return [chunk.header for chunk in chunks]


def test_ranges_are_of_one_dtype_and_of_4_mib_at_most():
    assert [(each.dtype, each.nbytes) for each in RUNS.ranges()] == [
        (Dtype.BF16, 300 * 40 * 2 + 6),
        (Dtype.F32, 77 * 4),
        (Dtype.BF16, CHUNK_NBYTES),
        (Dtype.BF16, CHUNK_NBYTES),
    ]


def test_what_is_encoded_passes():
    for each in headers():
        RUNS.check(each)
    RUNS.check_cover(headers())
    whole = encode_whole(RUNS, flat_bits(np.zeros(LAYOUT.nbytes, "u1")))
    RUNS.check_cover([chunk.header for chunk in whole])


@pytest.mark.parametrize(
    "lie",
    [
        {"offset": 1},
        {"offset": 1 << 40},
        {"offset": 64},
        {"nbytes": 3},
        {"nbytes": 0},
        {"nbytes": 1 << 62},
        {"changed_count": 12_004},
        {"changed_count": 0},
        {"payload_nbytes": CHUNK_NBYTES + 1},
        {"payload_nbytes": 0},
        {"dtype": Dtype.F32},
        {"dtype": Dtype.F16},
        {"encoding": Encoding.UNCHANGED},
        {"encoding": Encoding.DENSE},
        {"encoding": Encoding.UNCHANGED, "changed_count": 0, "payload_nbytes": 1},
        {
            "encoding": Encoding.UNCHANGED,
            "changed_count": 0,
            "payload_nbytes": 0,
            "compression": Compression.ZSTD,
        },
    ],
)
def test_a_header_that_cannot_be_true_is_refused(lie):
    first = headers()[0]
    assert first.encoding is Encoding.SPARSE_FAST

    with pytest.raises(AstraflowError, match="CHUNK_INVALID"):
        RUNS.check(replace(first, **{"compression": Compression.NONE, **lie}))


def test_ranges_of_chunks_must_rise_and_leave_nothing_out():
    first, second, third, fourth = headers()

    with pytest.raises(AstraflowError, match="begins inside the last"):
        RUNS.check_cover([first, third, second, fourth])
    with pytest.raises(AstraflowError, match="begins inside the last"):
        RUNS.check_cover([first, first, second, third, fourth])
    with pytest.raises(AstraflowError, match=f"nothing about {third.nbytes} bytes"):
        RUNS.check_cover([first, second, fourth])


def test_a_layout_without_bytes_has_no_chunks():
    runs = Runs(Layout.of([("none", Dtype.F32, (0,))]))

    assert not list(runs.ranges())
    runs.check_cover([])
