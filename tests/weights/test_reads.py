"""What reads parameters is made once, and follows them wherever they go."""

import pytest
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.publish.tensors import Reads

LAYOUT = Layout.of([("w", Dtype.BF16, (4, 6))])


@pytest.fixture
def reads():
    return Reads(ShardLayout(LAYOUT))


def values(reads, tensor):
    bits = reads.of({"w": tensor})["w"](0, 24)
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).reshape(4, 6)


def parameter(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(4, 6, generator=generator))


def test_a_parameter_that_stays_is_looked_at_once(reads):
    weights = parameter(0)
    first, second = (reads.of({"w": weights})["w"] for _ in range(2))
    assert first is second
    with torch.no_grad():
        weights += 1
    assert torch.equal(values(reads, weights), weights.bfloat16())


@pytest.mark.parametrize(
    "moved",
    [
        lambda data: data.clone() + 1,
        lambda data: data.bfloat16(),
        lambda data: data.double(),
        lambda data: data.as_strided((4, 6), (1, 4)),
        lambda data: data.T.contiguous().T,
    ],
    ids=["elsewhere", "of the layout's type", "wider", "other strides", "transposed"],
)
def test_a_parameter_that_is_moved_is_read_where_it_lies_now(reads, moved):
    weights = parameter(0)
    values(reads, weights)
    weights.data = moved(weights.data)
    assert torch.equal(values(reads, weights), weights.detach().bfloat16())


def test_a_parameter_that_is_not_contiguous_is_read_as_it_is_now(reads):
    weights = torch.nn.Parameter(torch.randn(6, 4).T)
    values(reads, weights)
    with torch.no_grad():
        weights += 1
    assert torch.equal(values(reads, weights), weights.detach().bfloat16())


def test_another_parameter_is_read_instead(reads):
    values(reads, parameter(0))
    other = parameter(1)
    assert torch.equal(values(reads, other), other.bfloat16())
    plain = other.detach() + 1
    assert torch.equal(values(reads, plain), plain.bfloat16())


def test_a_parameter_that_no_longer_fits_is_named(reads):
    weights = parameter(0)
    values(reads, weights)
    weights.data = weights.data.reshape(6, 4)
    with pytest.raises(AstraflowError, match="tensor w has the shape") as caught:
        reads.of({"w": weights})
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
