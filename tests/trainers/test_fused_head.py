"""Log-probabilities without logits, against those with."""

from dataclasses import replace

import pytest
import torch

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
@pytest.mark.parametrize("tile", [(512, 1 << 21), (64, 640), (32, 33)], ids=str)
def test_values_and_gradients_are_those_of_the_logits(dtype, tolerance, options, tile):
    bias, temperatures, banned = options
    tiling = Tiling(token_count=tile[0], element_count=tile[1])
    hidden, head = made(dtype, bias=bias, temperatures=temperatures, banned=banned, tiling=tiling)
    upstream = torch.randn(len(hidden), dtype=dtype)
    wanted = outcome(plain, hidden, head, upstream)
    for one, other in zip(outcome(fused_logprobs, hidden, head, upstream), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * 10)


def test_gradient_passes_the_numerical_check():
    sizes = {"tokens": 4, "words": 40}
    hidden, head = made(torch.float64, bias=True, temperatures=True, banned=True, **sizes)

    def logprobs(states, weight, bias):
        return fused_logprobs(states, replace(head, weight=weight, bias=bias))[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head.weight, head.bias))
