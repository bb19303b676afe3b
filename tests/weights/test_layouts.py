"""A frame knows which tensor every element belongs to."""

import numpy as np
import pytest

from astraflow.codec.changes import Change
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.layouts import ShardLayout

FRAME = ShardLayout(
    Layout.of(
        [
            ("a", Dtype.BF16, (33,)),
            ("b", Dtype.F32, (3,)),
            ("c", Dtype.BF16, (2, 2)),
            ("d", Dtype.BF16, (0,)),
            ("e", Dtype.BF16, ()),
        ]
    )
)


def change(*positions):
    bits = np.zeros(len(positions), np.uint16)
    indices = np.array(positions, np.uint32) - np.uint32(positions[0])
    return Change(dtype=Dtype.BF16, first=positions[0], indices=indices, before=bits, values=bits)


def test_a_change_is_split_by_tensor():
    first, second = FRAME.layout.by_name["c"], FRAME.layout.by_name["e"]
    positions = (0, 32, first.offset // 2, first.offset // 2 + 3, second.offset // 2)

    pieces = [(spec.name, part) for spec, part in FRAME.split(change(*positions))]

    assert pieces == [("a", slice(0, 2)), ("c", slice(2, 4)), ("e", slice(4, 5))]
    assert [spec.name for spec, _ in FRAME.split(change(first.offset // 2))] == ["c"]


@pytest.mark.parametrize("position", [33, 40, 64, 96 + 4, 96 + 33])
def test_a_change_of_padding_is_refused(position):
    for positions in ((position,), (0, position)):
        with pytest.raises(AstraflowError, match="no tensor") as caught:
            list(FRAME.split(change(*positions)))
        assert caught.value.reason is Reason.CHUNK_INVALID


def test_padding_must_be_zero():
    flat = np.zeros(FRAME.layout.nbytes, np.uint8)
    FRAME.check_padding(flat)
    for spec in FRAME.layout.tensors:
        flat[spec.offset : spec.offset + spec.nbytes] = 255
    FRAME.check_padding(flat)
    for at in (66, 127, len(flat) - 1):
        flat[at] = 1
        with pytest.raises(AstraflowError, match="belong to no tensor"):
            FRAME.check_padding(flat)
        flat[at] = 0
