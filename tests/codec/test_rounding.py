"""bf16 is what torch makes of f32, at every level."""

import numpy as np
import pytest
import torch

from astraflow.codec import kernels
from astraflow.codec.float_bits import round_bf16

# Zeros, infinities, the largest number, ties to even and to odd, the smallest number.
EDGES = np.array(
    [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1], np.uint32
).view(np.float32)


@pytest.mark.parametrize("count", [0, 1, 7, 40_000])
def test_values_are_rounded_as_torch_rounds_them(count, level):
    drawn = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    values = np.concatenate([EDGES, drawn.view(np.float32)])
    values = values[~np.isnan(values)]
    bits = np.empty(len(values), np.uint16)

    round_bf16(values, bits)

    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (bits == wanted).all()


def test_not_a_number_stays_one(level):
    values = np.array([0x7FC00000, 0x7F800001, 0xFF800001, 0xFFFFFFFF], np.uint32)
    bits = np.empty(4, np.uint16)

    round_bf16(values.view(np.float32), bits)

    assert np.isnan((bits.astype(np.uint32) << 16).view(np.float32)).all()


def test_room_that_is_too_small_is_refused():
    if kernels.level() is kernels.KernelLevel.NUMPY:
        pytest.skip("numpy says so itself")
    with pytest.raises(BufferError, match="bits is too small"):
        round_bf16(np.ones(4, np.float32), np.empty(3, np.uint16))
