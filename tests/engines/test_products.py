"""Products of f32 matrices through the faster library."""

import copy

import pytest
import torch
from torch import nn

from astraflow.engines.modules import (
    OnednnLinear,
    linear,
    onednn_is_faster,
    product,
    use_onednn,
)

SHAPES = [(1, 8, 4), (3, 32, 48), (40, 96, 33), (64, 576, 192)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_and_its_gradients_are_those_of_torch(shape, with_bias):
    torch.manual_seed(0)
    rows, width, count = shape
    states = torch.randn(2, rows, width, requires_grad=True)
    weight = torch.randn(count, width, requires_grad=True)
    bias = torch.randn(count, requires_grad=True) if with_bias else None
    upstream = torch.randn(2, rows, count)
    inputs = [states, weight, *([] if bias is None else [bias])]
    for each in (linear, nn.functional.linear):
        made = each(states, weight, bias)
        found = [made, *torch.autograd.grad(made, inputs, upstream)]
        if each is linear:
            ours = found
    for left, right in zip(ours, found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_a_transposed_product_is_that_of_torch():
    torch.manual_seed(0)
    left, right = torch.randn(48, 20).T, torch.randn(7, 48).T
    torch.testing.assert_close(product(left, right), left @ right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype):
    states, weight = torch.randn(4, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    assert torch.equal(linear(states, weight), nn.functional.linear(states, weight))


def test_nothing_is_left_of_no_rows():
    states, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    made = linear(states, weight)
    assert made.shape == (0, 3)
    made.sum().backward()
    assert states.grad.shape == (0, 8)
    assert not weight.grad.any()


def test_a_row_has_the_same_bits_among_any_others():
    torch.manual_seed(0)
    states, weight = torch.randn(64, 96), torch.randn(48, 96)
    whole = linear(states, weight)
    for count in range(16, 64):
        assert torch.equal(linear(states[:count].clone(), weight), whole[:count])


def test_layers_of_a_module_are_taken_over_with_their_weights():
    module = use_onednn(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    twin = copy.deepcopy(module)
    assert list(module.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for each in (module, twin):
        assert isinstance(each[0], OnednnLinear) == onednn_is_faster()
    states = torch.randn(5, 8)
    torch.testing.assert_close(module(states), twin(states))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_a_layer_can_be_recorded():
    module = use_onednn(nn.Sequential(nn.Linear(8, 4))).requires_grad_(requires_grad=False)
    recorded = torch.jit.trace(module, (torch.randn(5, 8),), check_trace=False)
    states = torch.randn(17, 8)
    assert torch.equal(recorded(states), module(states))
