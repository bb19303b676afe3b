"""Arrays of every kind are read as bits, where they lie, each rank its own rows."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardedBy
from torch.distributed.tensor import distribute_tensor

from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.layouts import WHOLE, Shard, ShardLayout
from astraflow.weights.publish.publisher import WeightPublisher, combined
from astraflow.weights.publish.tensors import Exported, Reads, reader_of

LAYOUT = Layout.of(
    [
        ("big", Dtype.BF16, (1100, 2048)),
        ("odd", Dtype.F32, (7, 3)),
        ("one", Dtype.F32, (1, 5)),
        ("scalar", Dtype.F32, ()),
        ("none", Dtype.BF16, (0, 4)),
    ]
)


def random_tensors(rng):
    return {s.name: rng.integers(0, 99, s.shape).astype(s.dtype.bits) for s in LAYOUT.tensors}


def spec(dtype, shape):
    (found,) = Layout.of([("w", dtype, shape)]).tensors
    return found


def bits(array, dtype, shape, shard=WHOLE):
    found = spec(dtype, shape)
    shape = shard.shape(found)
    return reader_of(array, found, shard)(0, int(np.prod(shape))).reshape(shape)


def refused(array, dtype, shape):
    with pytest.raises(AstraflowError, match="tensor w") as caught:
        bits(array, dtype, shape)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH


class TestArrays:
    def test_bits_and_own_types_of_numpy_are_views(self):
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        read = bits(values, Dtype.F32, (3, 4))

        assert np.shares_memory(read, values)
        assert (read == values.view(np.uint32)).all()
        assert (bits(values.view(np.uint32), Dtype.F32, (3, 4)) == read).all()

    def test_what_is_not_contiguous_is_read_in_its_order(self):
        values = np.arange(12, dtype=np.float32).reshape(4, 3)

        assert (bits(values.T, Dtype.F32, (3, 4)) == values.T.copy().view(np.uint32)).all()
        tensor = torch.from_numpy(values).T
        assert (bits(tensor, Dtype.F32, (3, 4)) == values.T.copy().view(np.uint32)).all()

    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [
            (torch.bfloat16, Dtype.BF16),
            (torch.float16, Dtype.F16),
            (torch.float32, Dtype.F32),
            (torch.float8_e4m3fn, Dtype.F8_E4M3),
            (torch.float8_e5m2, Dtype.F8_E5M2),
            (torch.int64, Dtype.I64),
            (torch.bool, Dtype.BOOL),
        ],
    )
    def test_tensors_keep_every_bit(self, kind, dtype):
        raw = torch.randint(0, 2, (5, 8 * dtype.itemsize), dtype=torch.uint8)
        tensor = torch.nn.Parameter(raw.view(kind), requires_grad=False)

        assert bits(tensor, dtype, (5, 8)).tobytes() == raw.numpy().tobytes()

    def test_wider_floats_are_rounded_to_nearest(self):
        values = torch.randn(100)

        read = bits(values, Dtype.BF16, (100,))
        assert read.tobytes() == values.bfloat16().view(torch.int16).numpy().tobytes()

    def test_what_gives_itself_by_dlpack_or_as_an_array_is_taken(self):
        values = np.arange(6, dtype=np.float32)

        class Given:
            def __dlpack__(self, **how):
                return values.__dlpack__(**how)

            def __dlpack_device__(self):
                return values.__dlpack_device__()

        class Like:
            def __array__(self, dtype=None, copy=None):
                return values

        for given in (Given(), Like()):
            assert (bits(given, Dtype.F32, (6,)) == values.view(np.uint32)).all()

    def test_another_type_or_shape_is_refused_by_name(self):
        refused(np.zeros(3, np.float64), Dtype.F32, (3,))
        refused(torch.zeros(3, dtype=torch.int32), Dtype.F32, (3,))
        refused(np.zeros((1, 3), np.float32), Dtype.F32, (3,))
        refused("text", Dtype.F32, (3,))

    def test_elements_with_their_bytes_in_another_order_are_refused(self):
        refused(np.arange(3, dtype=">f4"), Dtype.F32, (3,))


class TestShards:
    @pytest.mark.parametrize("count", [1, 2, 3, 8])
    def test_rows_are_cut_as_torch_cuts_them(self, count):
        for row_count in (1, 2, 7, 8, 9, 1100):
            whole = torch.arange(row_count)
            chunks = torch.chunk(whole, count)
            for rank in range(count):
                rows = Shard(rank=rank, count=count).rows(spec(Dtype.I64, (row_count,)))
                expected = chunks[rank].tolist() if rank < len(chunks) else []
                assert [*rows] == expected

    @pytest.mark.parametrize("count", [2, 3, 5])
    def test_parts_cover_the_layout_once(self, count):
        seen = np.zeros(LAYOUT.nbytes, np.int8)
        for rank in range(count):
            for where in ShardLayout(LAYOUT, Shard(rank=rank, count=count)).ranges():
                seen[where.bytes] += 1
        for each in LAYOUT.tensors:
            assert (seen[each.offset : each.offset + each.nbytes] == 1).all()
        assert seen.sum() == sum(each.nbytes for each in LAYOUT.tensors)

    def test_a_part_takes_only_its_own_memory(self):
        parts = [ShardLayout(LAYOUT, Shard(rank=rank, count=4)) for rank in range(4)]

        assert max(part.nbytes for part in parts) < LAYOUT.nbytes / 3

    def test_ranks_that_publish_their_rows_make_the_version_of_all(self):
        rng = np.random.default_rng(5)
        whole = WeightPublisher("p", LAYOUT)
        ranks = [WeightPublisher("p", LAYOUT, shard=Shard(rank=r, count=3)) for r in range(3)]
        tensors = {
            s.name: rng.integers(0, 99, s.shape).astype(s.dtype.bits) for s in LAYOUT.tensors
        }
        for version in range(3):
            tensors = {
                name: bits + (rng.random(bits.shape) < 0.01).astype(bits.dtype)
                for name, bits in tensors.items()
            }
            one = whole.publish(version, tensors)
            infos = [rank.publish(version, rows_of(tensors, rank)) for rank in ranks]
            joined = combined(infos)

            assert joined.content_digest == one.content_digest
            assert {(p.shard_rank, p.shard_count) for p in joined.patches} == {
                (0, 3),
                (1, 3),
                (2, 3),
            }

    def test_parts_of_different_versions_are_not_joined(self):
        ranks = [WeightPublisher("p", LAYOUT, shard=Shard(rank=r, count=2)) for r in range(2)]
        tensors = {s.name: np.zeros(s.shape, s.dtype.bits) for s in LAYOUT.tensors}
        infos = [ranks[0].publish(0, tensors), ranks[1].publish(1, tensors)]

        for wrong in (infos, [infos[0], infos[0]], infos[:1] * 1 + infos[:1]):
            with pytest.raises(AstraflowError) as caught:
                combined(wrong)
            assert caught.value.reason is Reason.INVALID_FIELD


def rows_of(tensors, publisher):
    """What a rank has: its rows, or, of small tensors, everything."""
    shard = publisher.history.shard_layout.shard
    return {
        name: array
        if array.ndim == 0 or name == "odd"
        else array[shard.rows(LAYOUT.by_name[name]).start : shard.rows(LAYOUT.by_name[name]).stop]
        for name, array in tensors.items()
    }


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("mesh") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class TestDTensors:
    def test_those_that_are_sharded_by_rows_are_read_where_they_lie(self, mesh):
        values = torch.randn(6, 4)
        sharded = distribute_tensor(values, mesh, [ShardedBy(0)])

        assert (bits(sharded, Dtype.F32, (6, 4)) == values.numpy().view(np.uint32)).all()

    def test_other_placements_are_refused(self, mesh):
        refused(distribute_tensor(torch.randn(6, 4), mesh, [ShardedBy(1)]), Dtype.F32, (6, 4))


def test_arrays_that_nobody_may_write_to_are_published_all_the_same():
    """Such are those of files that are mapped, of other frameworks, and of bytes."""
    tensors = random_tensors(np.random.default_rng(0))
    for tensor in tensors.values():
        tensor.setflags(write=False)
    publisher = WeightPublisher("solver", LAYOUT)
    for version in (0, 1):
        info = publisher.publish(version, tensors)
    writable = {name: tensor.copy() for name, tensor in tensors.items()}
    assert (
        info.content_digest == WeightPublisher("solver", LAYOUT).publish(0, writable).content_digest
    )


def test_ranges_over_several_tensors_are_put_together():
    rng = np.random.default_rng(1)
    tensors = random_tensors(rng)
    part = ShardLayout(LAYOUT)
    exported = Exported(part, Reads(part).of(tensors))
    flat = np.zeros(LAYOUT.nbytes, np.uint8)
    for where in part.ranges():
        flat[where.bytes].view(where.dtype.bits)[:] = exported.bits(where)

    for name, array in tensors.items():
        assert (LAYOUT.view(flat, name) == array).all()
    assert exported.gather_s > 0
    assert StateDigest.of(LAYOUT, flat) == WeightPublisher("p", LAYOUT).history.start(
        0, exported.bits
    )
