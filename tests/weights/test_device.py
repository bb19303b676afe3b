"""Torch operations make and apply the same chunks as the codec does on the host."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec.chunks import CHUNK_NBYTES, Encoding, Runs
from astraflow.codec.decode import decode_change
from astraflow.codec.encode import encode_patch, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.device import decode_change_on_device, encode_patch_on_device

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]
KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def draw(seed, dtype, count, share):
    rng = np.random.default_rng(seed)
    layout = Layout.of([("w", dtype, (count,))])
    base = rng.integers(0, 256, layout.nbytes).astype(np.uint8)
    base[count * dtype.itemsize :] = 0
    target = base.copy()
    old, new = layout.view(base, "w"), layout.view(target, "w")
    old[: len(old) // 8] = 0
    new[: len(new) // 8] = 1 << (8 * dtype.itemsize - 1)
    near, far = (rng.random(count) < share / 2 for _ in range(2))
    new[near] = old[near] + rng.choice([1, -1], int(near.sum())).astype(dtype.bits)
    new[far] = rng.integers(0, 256, far.sum() * dtype.itemsize).astype(np.uint8).view(dtype.bits)
    new[~(near | far)] = old[~(near | far)]
    return layout, base, target


def on_device(flat, device):
    whole = torch.from_numpy(flat.copy()).to(device)
    return lambda where: whole[where.bytes].view(KINDS[where.dtype.itemsize])


def content(patch):
    return [(chunk.header, bytes(chunk.payload)) for chunk in patch.chunks]


def check(layout, base, target, device):
    runs, start = Runs(layout), StateDigest.of(layout, base)
    host = encode_patch(runs, flat_bits(target), flat_bits(base), start)

    made = encode_patch_on_device(runs, on_device(target, device), on_device(base, device), start)

    assert content(made) == content(host)
    assert made.digest == host.digest
    state = torch.from_numpy(base.copy()).to(device)
    for chunk in made.chunks:
        where = slice(chunk.header.offset, chunk.header.end)
        part = state[where].view(KINDS[chunk.header.dtype.itemsize])
        change = decode_change_on_device(chunk, part)
        expected = decode_change(chunk, base[where].view(chunk.header.dtype.bits))
        assert len(change.indices) == (0 if expected is None else len(expected.positions))
        change.apply(part)
    assert (state.cpu().numpy() == target).all()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(list(Dtype)),
    count=st.integers(1, 4000),
    share=st.sampled_from([0, 0.002, 0.05, 0.6]),
)
def test_a_patch_made_on_a_device_has_the_bytes_of_one_made_on_the_host(
    device, seed, dtype, count, share
):
    check(*draw(seed, dtype, count, share), device)


@pytest.mark.parametrize("device", DEVICES)
def test_several_ranges_are_as_on_the_host(device):
    layout, base, target = draw(0, Dtype.BF16, CHUNK_NBYTES + 77, 0.01)
    target[:CHUNK_NBYTES] = base[:CHUNK_NBYTES]

    check(layout, base, target, device)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_spoilt_payload_is_refused_as_on_the_host_or_means_the_same(data):
    layout, base, target = draw(1, Dtype.BF16, 3000, 0.1)
    bits = flat_bits(base)
    (chunk,) = encode_patch(Runs(layout), flat_bits(target), bits, StateDigest()).chunks
    assert chunk.header.encoding is Encoding.SPARSE_FAST
    payload = bytearray(chunk.payload)
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    object.__setattr__(chunk, "payload", bytes(payload))
    where = next(Runs(layout).ranges())

    try:
        expected = decode_change(chunk, bits(where))
    except AstraflowError:
        with pytest.raises(AstraflowError):
            decode_change_on_device(chunk, on_device(base, "cpu")(where))
    else:
        found = decode_change_on_device(chunk, on_device(base, "cpu")(where))
        assert (found.indices.numpy() == expected.positions).all()
        assert (found.values.numpy().view(np.uint16) == expected.values).all()


def test_a_chunk_of_the_compact_profile_is_left_to_the_host():
    layout, base, target = draw(1, Dtype.BF16, 300, 0.1)
    (chunk,) = encode_patch(Runs(layout), flat_bits(target), flat_bits(base), StateDigest()).chunks
    object.__setattr__(chunk.header, "encoding", Encoding.SPARSE_COMPACT)

    with pytest.raises(AstraflowError, match="decoded on the host"):
        decode_change_on_device(chunk, on_device(base, "cpu")(next(Runs(layout).ranges())))
