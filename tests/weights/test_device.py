"""Torch operations make the same chunks as the codec does on the host, and publishers use them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec.chunks import CHUNK_NBYTES, Encoding, Runs
from astraflow.codec.encode import encode_patch, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.layouts import WHOLE, Shard, ShardLayout
from astraflow.weights.publish import device as device_module
from astraflow.weights.publish.device import DeviceExport, encode_patch_on_device
from astraflow.weights.publish.publisher import WeightPublisher

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

    given = (runs, on_device(target, device), on_device(base, device), start)
    made = encode_patch_on_device(*given, device=torch.device(device))

    assert content(made) == content(host)
    assert made.digest == host.digest


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [4 << 20, 1000])
def test_a_span_of_ranges_that_change_more_and_less_is_as_on_the_host(device, most, monkeypatch):
    monkeypatch.setattr(device_module, "_MOST_CHANGES", most)
    monkeypatch.setattr(device_module, "_MOST_SPAN", 4 * CHUNK_NBYTES)
    layout, base, target = draw(1, Dtype.BF16, 3 * CHUNK_NBYTES + 77, 0)
    rng = np.random.default_rng(2)
    bits = target.view(np.int16)
    for at, share in enumerate((0.01, 0, 1e-6, 0.9, 0.001, 0.3)):
        where = slice(at * CHUNK_NBYTES // 2, (at + 1) * CHUNK_NBYTES // 2)
        bits[where] += (rng.random(CHUNK_NBYTES // 2) < share).astype(np.int16)
    bits[-CHUNK_NBYTES // 2 :] = rng.integers(-(2**15), 2**15, CHUNK_NBYTES // 2)
    runs, start = Runs(layout), StateDigest.of(layout, base)
    host = encode_patch(runs, flat_bits(target), flat_bits(base), start)
    given = (runs, on_device(target, device), on_device(base, device), start)
    made = encode_patch_on_device(*given, device=torch.device(device))
    assert content(made) == content(host)
    assert made.digest == host.digest
    assert {chunk.header.encoding for chunk in made.chunks} == {
        Encoding.UNCHANGED,
        Encoding.SPARSE_FAST,
        Encoding.DENSE,
    }


LAYOUT = Layout.of(
    [
        ("a", Dtype.BF16, (700, 3000)),
        ("b", Dtype.F32, (77,)),
        ("c", Dtype.BF16, ()),
        ("d", Dtype.BF16, (5, 11)),
        ("e", Dtype.I64, (5,)),
        ("f", Dtype.F32, (0, 4)),
    ]
)


class Weights:
    """Tensors on a device, master weights of f32 where bf16 is published, that move a little."""

    def __init__(self, device):
        self.rng = np.random.default_rng(0)
        self.tensors = {
            spec.name: torch.nn.Parameter(self._drawn(spec).to(device), requires_grad=False)
            for spec in LAYOUT.tensors
        }

    def _drawn(self, spec):
        drawn = torch.as_tensor(self.rng.normal(size=spec.shape))
        return drawn.long() if spec.dtype is Dtype.I64 else drawn.float()

    def step(self, share):
        for name, tensor in self.tensors.items():
            moved = torch.as_tensor(self.rng.random(tuple(tensor.shape)) < share)
            scale = 2 if name == "e" else 1 + 2**-7
            moved = moved.to(tensor.device)
            tensor.data = torch.where(moved, tensor * scale, tensor).to(tensor.dtype)


def publishers(weights, shard=WHOLE):
    """One publisher that compares on the host, one that does so where the weights are."""
    host, device = (WeightPublisher(PolicyId("p"), LAYOUT, shard=shard) for _ in range(2))
    device.copies_on_device = True
    return host, device


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shard", [WHOLE, Shard(rank=1, count=3)])
def test_versions_that_are_compared_on_a_device_are_those_of_the_host(device, shard):
    weights = Weights(device)
    host, other = publishers(weights, shard)
    for version, share in enumerate((0, 0.01, 0, 0.9, 0.001)):
        weights.step(share)
        expected = host.publish(version, weights.tensors)
        assert other.publish(version, weights.tensors) == expected
        assert other.scrub()
    for version in range(5):
        for where in other.history.shard_layout.ranges():
            found = other.history.bits_of(version)(where)
            assert (found == host.history.bits_of(version)(where)).all()


def test_weights_that_are_not_of_torch_are_compared_on_the_host():
    weights = Weights("cpu")
    host, other = publishers(weights)
    for version in range(3):
        weights.step(0.01)
        given = dict(weights.tensors)
        if version == 1:
            given["e"] = given["e"].numpy()
        assert other.publish(version, given) == host.publish(version, given)
        assert other.scrub()


def test_a_copy_that_rots_on_the_device_is_found_and_the_next_version_comes_whole():
    weights = Weights("cpu")
    _, publisher = publishers(weights)
    publisher.publish(0, weights.tensors)
    publisher._device._flat[17] ^= 4
    assert publisher.scrub() is False
    weights.step(0.01)
    (patch,) = publisher.publish(1, weights.tensors).patches
    assert patch.base_version is None
    assert publisher.scrub()
    weights.step(0.01)
    (patch,) = publisher.publish(2, weights.tensors).patches
    assert patch.base_version == 1


def test_an_encoding_that_fails_leaves_the_copy_as_it_was():
    weights = Weights("cpu")
    host, publisher = publishers(weights)
    for each in (host, publisher):
        each.publish(0, weights.tensors)
    copy, export = publisher._device, DeviceExport(publisher.history.shard_layout, weights.tensors)

    def fail(chunk):
        raise OSError(chunk)

    weights.step(0.5)
    with pytest.raises(OSError, match="Chunk"):
        copy.encode(export.bits, publisher._digest, made=fail)
    assert copy.digest() == publisher._digest
    assert publisher.publish(1, weights.tensors) == host.publish(1, weights.tensors)


@pytest.mark.parametrize(
    ("free", "held", "has_room"), [(1.0, 0, True), (0.5, 0.6, True), (0.5, 0.4, False)]
)
def test_a_copy_is_made_by_itself_where_its_memory_is_to_be_had(free, held, has_room, monkeypatch):
    part = ShardLayout(LAYOUT)
    export = DeviceExport(part, Weights("cpu").tensors)
    assert not export.has_room
    export.device = torch.device("cuda")
    info = (int(free * part.nbytes), 20 * part.nbytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 2 * part.nbytes)
    allocated = 2 * part.nbytes - int(held * part.nbytes)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated)
    assert export.has_room is has_room
