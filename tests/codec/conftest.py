"""Layouts and states with every dtype, NaNs and signed zeros among their bits."""

import numpy as np
import pytest

from astraflow.codec import kernels
from astraflow.codec.chunks import Runs
from astraflow.core.tensors import Dtype, Layout


class States:
    """Random states of one layout that holds every dtype."""

    layout = Layout.of(
        [(f"t{number:02}.{dtype}", dtype, (37 + number,)) for number, dtype in enumerate(Dtype)]
        + [("t99.scalar", Dtype.BF16, ()), ("t99.zero", Dtype.F32, (0, 3))]
    )

    def __init__(self):
        self.runs = Runs(self.layout)

    def random(self, rng, layout=None):
        layout = layout or self.layout
        flat = np.zeros(layout.nbytes, np.uint8)
        for spec in layout.tensors:
            part = flat[spec.offset : spec.offset + spec.nbytes]
            part[:] = rng.integers(0, 256, spec.nbytes, np.uint8)
            specials = special_bits(spec.dtype)
            bits = part.view(spec.dtype.bits)
            bits[: len(specials)] = specials[: len(bits)]
        return flat

    def touched(self, flat, rng, share, layout=None):
        """Change a share of the elements: some by a unit in the last place, some to anything."""
        layout = layout or self.layout
        new = flat.copy()
        for spec in layout.tensors:
            bits = layout.view(new, spec.name).reshape(-1)
            near, far = (rng.random(bits.shape) < share / 2 for _ in range(2))
            bits[near] += rng.choice([1, -1], int(near.sum())).astype(bits.dtype)
            top = 2 ** (8 * spec.dtype.itemsize) - 1
            bits[far] = rng.integers(0, top, int(far.sum()), np.uint64, endpoint=True)
            specials = special_bits(spec.dtype)
            if share and len(bits):
                bits[-1] = rng.choice(specials)
        return new


def special_bits(dtype):
    """Zeros of both signs, all ones (a NaN of floats), the top exponent with payloads."""
    width = 8 * dtype.itemsize
    top = 1 << (width - 1)
    quiet = {2: 0x7FC1, 4: 0x7FC00001, 8: 0x7FF8000000000001}.get(dtype.itemsize, 0x7F)
    return np.array([0, top, 2 * top - 1, top - 1, quiet, quiet | top], dtype.bits)


@pytest.fixture(params=kernels.levels(), ids=lambda each: each.name.lower(), scope="module")
def level(request):
    """Do the work at every level that this machine has."""
    with kernels.forced(request.param):
        yield request.param


@pytest.fixture(scope="session")
def states():
    return States()
