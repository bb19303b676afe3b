"""Weights in files: against the format's own library, bit by bit, and files that lie."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate
from astraflow.storage.weight_files import compare, flatten, read_weights, write_weights


def part(name, dtype, values, shape):
    spec = TensorSpec(name=name, dtype=dtype, shape=shape, offset=0)
    return TensorUpdate(spec=spec, indices=None, values=np.array(values, dtype.bits))


def test_what_is_written_is_what_the_library_reads(tmp_path):
    file = tmp_path / "below" / "model.safetensors"
    parts = (
        part("b", Dtype.F8_E4M3, [1, 2, 255], (3,)),
        part("a", Dtype.BF16, [0x3F80, 0x7FC1, 0x8000, 0], (2, 2)),
        part("c", Dtype.I64, [7], ()),
    )
    write_weights(file, parts)
    assert [each.name for each in file.parent.iterdir()] == ["model.safetensors"]
    loaded = load_file(file)
    assert loaded["a"].dtype is torch.bfloat16
    assert loaded["a"].view(torch.int16).numpy().view(np.uint16).tolist() == [
        [0x3F80, 0x7FC1],
        [0x8000, 0],
    ]
    assert loaded["b"].view(torch.uint8).tolist() == [1, 2, 255]
    assert loaded["c"].item() == 7
    for each in parts:
        found = read_weights(file)[each.spec.name]
        assert found.dtype is each.spec.dtype
        np.testing.assert_array_equal(found.bits.reshape(-1), each.values)


def test_a_folder_is_read_as_one_model(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    layout, flat = flatten(read_weights(tmp_path))
    assert [spec.name for spec in layout.tensors] == ["a", "b"]
    assert layout.view(flat, "b").tolist() == [0x3F80, 0x3F80]


def test_a_difference_is_counted_by_bits(tmp_path):
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    save_file({"a": torch.tensor([0.0, 1.0, 2.0]), "b": torch.ones(1), "d": torch.ones(2)}, one)
    save_file({"a": torch.tensor([-0.0, 1.0, 3.0]), "c": torch.ones(1), "d": torch.ones(3)}, other)
    a, b, c, d = compare(read_weights(one), read_weights(other))
    assert (a.changed_count, a.element_count) == (2, 3)
    assert (b.note, c.note) == ("only in the first", "only in the second")
    assert d.note == "f32[2] became f32[3]"
    assert compare(read_weights(one), read_weights(one)) == ()


def lying(**fields):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        (1 << 60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{]",
        lying(data_offsets=[0, 16]),
        lying(data_offsets=[-8, 0]),
        lying(shape=[3]),
        lying(dtype="F31"),
        lying(data_offsets=None),
    ],
)
def test_a_file_that_is_not_sound_is_named(tmp_path, data):
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with pytest.raises(AstraflowError, match=r"x\.safetensors") as caught:
        read_weights(file)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(AstraflowError, match="has no"):
        read_weights(tmp_path)


def test_a_tensor_in_two_files_is_named(tmp_path):
    for name in ("one", "two"):
        save_file({"a": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(AstraflowError, match="has a, as"):
        read_weights(tmp_path)
