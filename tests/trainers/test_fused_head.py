"""Log-probabilities without logits, against those with."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from astraflow.trainers.fused_head import Head, Tiling, fused_logprobs


def plain(hidden, head):
    logits = hidden @ head.weight.T
    if head.bias is not None:
        logits = logits + head.bias
    logits = logits.index_fill(1, head.banned, -torch.inf)
    if head.temperatures is not None:
        logits = logits / head.temperatures
    logprobs = logits.log_softmax(-1)
    finite = logprobs.detach().clamp_min(-1e30)
    chosen = logprobs.gather(1, head.targets[:, None])[:, 0]
    return chosen, -(finite.exp() * finite).sum(-1)


def made(dtype, *, bias, temperatures, banned, tokens=70, words=300, width=16, tiling=None):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    head = Head(
        weight=torch.randn(words, width, dtype=dtype, requires_grad=True),
        bias=torch.randn(words, dtype=dtype, requires_grad=True) if bias else None,
        targets=torch.randint(20, words, (tokens,)),
        temperatures=torch.rand(tokens, 1, dtype=dtype) + 0.5 if temperatures else None,
        banned=torch.tensor([0, 7, 19]) if banned else torch.zeros(0, dtype=torch.long),
        tiling=tiling or Tiling(),
    )
    return hidden, head


def outcome(found, hidden, head, upstream):
    logprobs, entropies = found(hidden, head)
    leaves = [each for each in (hidden, head.weight, head.bias) if each is not None]
    gradients = torch.autograd.grad((logprobs * upstream).sum(), leaves)
    return logprobs.detach(), entropies, *gradients


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "options", [(False, False, False), (True, True, True)], ids=["bare", "all"]
)
@pytest.mark.parametrize("tile", [(512, 1024), (64, 10), (7, 33)], ids=str)
def test_values_and_gradients_are_those_of_the_logits(dtype, tolerance, options, tile):
    bias, temperatures, banned = options
    tiling = Tiling(token_count=tile[0], word_count=tile[1])
    hidden, head = made(dtype, bias=bias, temperatures=temperatures, banned=banned, tiling=tiling)
    upstream = torch.randn(len(hidden), dtype=dtype)
    wanted = outcome(plain, hidden, head, upstream)
    for one, other in zip(outcome(fused_logprobs, hidden, head, upstream), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.slow
def test_gradient_passes_the_numerical_check():
    sizes = {"tokens": 4, "words": 40}
    hidden, head = made(torch.float64, bias=True, temperatures=True, banned=True, **sizes)

    def logprobs(states, weight, bias):
        return fused_logprobs(states, replace(head, weight=weight, bias=bias))[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head.weight, head.bias))


def flop_count(states, _added, weight, *_others, **_given):
    return 2 * states[0] * states[1] * weight[0]


def added_flop_count(_sum, left, right, **_given):
    return 2 * left[0] * left[1] * right[1]


# What the counter does not know: oneDNN's products, see `engines.modules`, and sums in place.
PRODUCTS = {
    torch.ops.mkldnn._linear_pointwise: flop_count,
    torch.ops.aten.addmm_: added_flop_count,
}


def wanted_gradients(hidden, head):
    return torch.autograd.grad(plain(hidden, head)[0].sum(), [hidden, head.weight])


def test_logits_of_as_many_tokens_as_a_hidden_state_has_numbers_are_made_once():
    sizes = {"tokens": 64, "words": 96, "tiling": Tiling(token_count=32, word_count=40)}
    hidden, head = made(torch.float32, bias=False, temperatures=False, banned=False, **sizes)
    with FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
        fused_logprobs(hidden, head)[0].sum().backward()
    all_logits = 2 * 64 * 16 * 96
    # Logits there and back, those that are kept once; gradients of hidden states and weight.
    assert counter.get_total_flops() == (2 - 16 / 64 + 2) * all_logits


def test_gradients_of_several_passes_add_up_in_place():
    hidden, head = made(torch.float64, bias=False, temperatures=False, banned=False)
    head = replace(head, adds_up=True, tiling=Tiling(token_count=8, word_count=32))
    wanted = wanted_gradients(hidden, head)[1]
    fused_logprobs(hidden, head)[0].sum().backward()
    there = head.weight.grad
    torch.testing.assert_close(there, wanted)
    fused_logprobs(hidden, head)[0].sum().backward()
    assert head.weight.grad is there
    torch.testing.assert_close(there, 2 * wanted)


def test_a_second_way_back_finds_the_same_gradients():
    hidden, head = made(torch.float64, bias=False, temperatures=False, banned=False)
    total = fused_logprobs(hidden, head)[0].sum()
    first = torch.autograd.grad(total, [hidden, head.weight], retain_graph=True)
    for one, other in zip(torch.autograd.grad(total, [hidden, head.weight]), first, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_not_trained_gets_no_gradient(frozen):
    hidden, head = made(torch.float64, bias=False, temperatures=False, banned=False)
    by_hidden, by_weight = wanted_gradients(hidden, head)
    (hidden if frozen == "hidden" else head.weight).requires_grad_(False)
    fused_logprobs(hidden, head)[0].sum().backward()
    if frozen == "hidden":
        assert hidden.grad is None
        torch.testing.assert_close(head.weight.grad, by_weight)
    else:
        assert head.weight.grad is None
        torch.testing.assert_close(hidden.grad, by_hidden)


def test_logits_as_large_as_a_float_holds_make_no_nan():
    hidden, head = made(torch.float32, bias=False, temperatures=False, banned=True)
    hidden = (hidden.detach() * 1e30).requires_grad_()
    logprobs, entropies = fused_logprobs(hidden, head)
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropies).all()
    assert torch.isfinite(head.weight.grad).all()


def test_bf16_is_summed_in_f32():
    sizes = {"tokens": 40, "words": 3000, "tiling": Tiling(token_count=16, word_count=64)}
    hidden, head = made(torch.bfloat16, bias=False, temperatures=False, banned=False, **sizes)
    logprobs, entropies = fused_logprobs(hidden, head)
    found = torch.autograd.grad(logprobs.sum(), [hidden, head.weight])
    logits = (hidden @ head.weight.T).float()
    wanted = logits.log_softmax(-1).gather(1, head.targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, wanted)
    assert entropies.dtype is torch.float32
    for one, other in zip(
        found, torch.autograd.grad(wanted.sum(), [hidden, head.weight]), strict=True
    ):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_multiplies_bf16_and_sums_in_f32(monkeypatch):
    hidden, head = made(
        torch.float64, bias=True, temperatures=True, banned=True, tokens=600, words=4000, width=256
    )
    # Logits of a few units, as those of models are.
    head = replace(head, weight=(head.weight.detach() / 16).requires_grad_())
    upstream = torch.randn(600, dtype=torch.float64)
    wanted = outcome(plain, hidden, head, upstream)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    leaves = [each.detach().float().cuda().requires_grad_() for each in (hidden, head.weight)]
    own = replace(
        head,
        weight=leaves[1],
        bias=head.bias.detach().float().cuda().requires_grad_(),
        targets=head.targets.cuda(),
        temperatures=head.temperatures.float().cuda(),
        tiling=Tiling(token_count=256, word_count=1024),
    )
    found = outcome(fused_logprobs, leaves[0], own, upstream.float().cuda())
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert (one.cpu() - other).norm() < 0.01 * other.norm()
