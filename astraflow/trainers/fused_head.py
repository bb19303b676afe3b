"""Log-probabilities and entropies straight from hidden states: no logits of a whole pass.

The output layer of a large vocabulary makes logits many times the size of its input. Here they
exist one tile (some tokens by some of the vocabulary) at a time: the forward pass keeps running
sums of each token's softmax, the backward pass makes each tile again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How large a tile is; there are at most two at a time.

    Attributes:
        token_count: Tokens in it.
        element_count: Logits in it; 8 MiB in f32.
    """

    token_count: int = 512
    element_count: int = 1 << 21

    def tokens(self, count: int) -> Iterator[slice]:
        """Cut tokens up."""
        return _cuts(count, self.token_count)

    def words(self, tokens: slice, head: "Head") -> Iterator[slice]:
        """Cut the vocabulary up."""
        size = max(1, self.element_count // (tokens.stop - tokens.start))
        return _cuts(len(head.weight), size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """An output layer, and what is done to its logits.

    Attributes:
        weight: f[V, H].
        bias: f[V], or None.
        targets: i64[k], tokens whose log-probabilities are wanted.
        temperatures: f[k, 1], by which logits are divided; None: all 1.
        banned: i64[b], ids that are never drawn; none of them is a target.
        tiling: Of the logits.
    """

    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperatures: Tensor | None
    banned: Tensor
    tiling: Tiling = Tiling()


def fused_logprobs(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of tokens.

    Args:
        hidden: f[k, H], what the output layer reads for each token.
        head: The output layer.

    Returns:
        f[k] with a gradient where that is enabled, and f[k] without; entropies in nats.
    """
    apply = cast("Any", _Fused).apply
    return apply(hidden, head.weight, head.bias, head)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head
    ) -> tuple[Tensor, Tensor]:
        norms, chosen, entropies = _softmax_sums(hidden, head)
        # Saved so that a change in place of weights that are still needed is noticed.
        ctx.save_for_backward(hidden, weight, bias, norms)
        ctx.head = head
        ctx.mark_non_differentiable(entropies)
        return chosen - norms, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, norms = ctx.saved_tensors
        head = replace(ctx.head, weight=weight, bias=bias)
        return (*_gradients(hidden, head, norms, gradients[0]), None)


def _softmax_sums(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Return f[k] each: log of the softmax's denominator, the target's logit, the entropy."""
    count = len(hidden)
    norms, chosen, entropies = (hidden.new_empty(count) for _ in range(3))
    for tokens in head.tiling.tokens(count):
        # Not minus infinity, which less itself is no number: all words of a tile may be banned.
        lowest = torch.finfo(hidden.dtype).min
        most = hidden.new_full((tokens.stop - tokens.start,), lowest)
        mass, mean = torch.zeros_like(most), torch.zeros_like(most)
        for words in head.tiling.words(tokens, head):
            logits = _tile(hidden, head, tokens, words)
            _pick(chosen, logits, head.targets, tokens, words)
            top = torch.maximum(most, logits.amax(1))
            fade = (most - top).exp()
            shares = (logits - top[:, None]).exp_()
            # A banned word adds 0 times its logit.
            logits.clamp_(min=lowest)
            mass = mass * fade + shares.sum(1)
            mean = mean * fade + shares.mul_(logits).sum(1)
            most = top
        norms[tokens] = most + mass.log()
        entropies[tokens] = norms[tokens] - mean / mass
    return norms, chosen, entropies


def _gradients(
    hidden: Tensor, head: Head, norms: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of hidden states, weight and bias.

    d logprob / d logits = onehot(target) - softmax, over the temperature.
    """
    by_hidden, by_weight = torch.zeros_like(hidden), torch.zeros_like(head.weight)
    by_bias = None if head.bias is None else torch.zeros_like(head.bias)
    for tokens in head.tiling.tokens(len(hidden)):
        scale = gradient[tokens, None]
        if head.temperatures is not None:
            scale = scale / head.temperatures[tokens]
        for words in head.tiling.words(tokens, head):
            tile = _tile(hidden, head, tokens, words)
            tile.sub_(norms[tokens, None]).exp_().neg_()
            at, column = _inside(head.targets, tokens, words)
            tile[at, column] += 1
            tile.mul_(scale)
            by_hidden[tokens].addmm_(tile, head.weight[words])
            by_weight[words].addmm_(tile.T, hidden[tokens])
            if by_bias is not None:
                by_bias[words] += tile.sum(0)
    return by_hidden, by_weight, by_bias


def _tile(hidden: Tensor, head: Head, tokens: slice, words: slice) -> Tensor:
    """Return the logits of some tokens at some of the vocabulary, f[t, v]."""
    logits = hidden[tokens] @ head.weight[words].T
    if head.bias is not None:
        logits += head.bias[words]
    if head.temperatures is not None:
        logits /= head.temperatures[tokens]
    banned = head.banned[(head.banned >= words.start) & (head.banned < words.stop)]
    return logits.index_fill_(1, banned - words.start, -torch.inf) if len(banned) else logits


def _pick(chosen: Tensor, logits: Tensor, targets: Tensor, tokens: slice, words: slice) -> None:
    """Keep the logits of the targets that lie in a tile."""
    at, column = _inside(targets, tokens, words)
    chosen[tokens][at] = logits[at, column]


def _inside(targets: Tensor, tokens: slice, words: slice) -> tuple[Tensor, Tensor]:
    """Return which tokens of a tile have their target in it, and in which column."""
    some = targets[tokens]
    at = torch.nonzero((some >= words.start) & (some < words.stop))[:, 0]
    return at, some[at] - words.start


def _cuts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
