"""Log-probabilities and entropies straight from hidden states: no logits of a whole pass.

The output layer of a large vocabulary makes logits many times the size of its input. Here they
exist one tile (some tokens by some of the vocabulary) at a time: the forward pass keeps running
sums of each token's softmax, the backward pass makes each tile again. That is a fourth product
of matrices beside the three of plain logits. It is saved for the first tokens, whose logits wait
in the array that the weight's gradient will take: as many tokens as a hidden state has numbers.

Tiles are as large as memory allows. Threads share each product and wait for each other after it,
so the fewer products there are, the less is lost. Which tokens have their target in a tile is no
question to the device: on a GPU nothing waits between the first tile and the last.

Where a GPU's products of f32 may be TF32, they are of bf16 with sums in f32: half as long, and what
samplers compute. Logits, softmax and gradients of the weight stay f32.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from astraflow.engines.modules import onednn_is_faster, product

# The logit of a word that is never drawn: finite, so that 0 times it is 0.
BANNED = -1e30

# Of a strip: 2 MiB in f32, near a core. A GPU works on a tile at once.
_STRIP_ELEMENTS = {"cpu": 1 << 19}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How large a tile is: 8 MiB in f32. There is one at a time.

    Attributes:
        token_count: Tokens in it, but for those whose logits are kept: all these are one tile.
        word_count: Of the vocabulary.
    """

    token_count: int = 2048
    word_count: int = 1024

    @classmethod
    def of(cls, device: torch.device) -> "Tiling":
        """Return the tiles of a device: 128 MiB on a GPU, whose products are to fill it."""
        return cls() if device.type == "cpu" else cls(token_count=4096, word_count=8192)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """An output layer, and what is done to its logits.

    Attributes:
        weight: f[V, H].
        bias: f[V], or None.
        targets: i64[k], tokens whose log-probabilities are wanted.
        temperatures: f[k, 1], by which logits are divided; None: all 1.
        banned: i64[b], ids that are never drawn, rising, on the host; none of them is a target.
        adds_up: Whether the backward pass adds to `weight.grad` in place where there is one, so
            that no second array of that size is made: for `Tensor.backward`, never for
            `torch.autograd.grad`.
    """

    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    temperatures: Tensor | None
    banned: Tensor
    tiling: Tiling = Tiling()
    adds_up: bool = False

    @property
    def sum_of_gradients(self) -> Tensor | None:
        """What the gradient of the weight is added to in place; None: it is made anew."""
        return self.weight.grad if self.adds_up and self.weight.is_leaf else None


class Tiles:
    """Makes one tile after the other, words first.

    Logits of the first tokens may wait where the weight's gradient will be: the H numbers of each
    word have room for the logits of H tokens at that word.

    Attributes:
        hidden: f[k, H], what the output layer reads.
        states: The same, as it is multiplied: rounded, perhaps.
        weight: That of the output layer, likewise.
        kept: f[V, H], in which logits wait; None: all are made again.
        dtype: Of logits, and of all that is summed up: f32 where the rest is bf16.
        tokens: How they are cut up; those whose logits wait are the first tile.
        strip_rows: Of a tile, so that a strip stays near a core while it is worked on.
    """

    def __init__(self, hidden: Tensor, head: Head) -> None:
        self.hidden = hidden
        self.head = head
        is_rounded = _may_round(hidden, head.weight)
        self.states = hidden.bfloat16() if is_rounded else hidden
        self.weight = head.weight.detach().bfloat16() if is_rounded else head.weight
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.kept = torch.empty_like(head.weight) if _fits_logits(head) else None
        size, count = head.tiling.token_count, len(hidden)
        self._first = min(count, size if self.kept is None else head.weight.shape[1])
        self.tokens = (slice(0, self._first), *cuts(count, size, start=self._first))
        self.words = cuts(len(head.weight), head.tiling.word_count)
        columns = _size(self.words[0])
        rows = max(map(_size, self.tokens))
        self._tile = hidden.new_empty(rows * columns, dtype=self.dtype)
        most = _STRIP_ELEMENTS.get(hidden.device.type, rows * columns)
        self.strip_rows = min(rows, max(1, most // columns))
        self._strip = hidden.new_empty(self.strip_rows * columns, dtype=self.dtype)
        self._rounded: Tensor | None = None
        self._banned = head.banned.to(hidden.device)
        self._banned_ids: list[int] = cast("Any", head.banned).tolist()

    @property
    def is_rounded(self) -> bool:
        """Whether what is multiplied is of fewer bits than what was given."""
        return self.states is not self.hidden

    def tile_buffer(self, tokens: slice, words: slice) -> Tensor:
        """Return the room of a tile, f[t, v]."""
        rows, columns = _size(tokens), _size(words)
        return self._tile[: rows * columns].view(rows, columns)

    def slopes_buffer(self, tile: Tensor) -> Tensor:
        """Return room for a tile in the type that it is multiplied in: the same, or another."""
        if not self.is_rounded:
            return tile
        if self._rounded is None:
            self._rounded = torch.empty_like(self._tile, dtype=self.states.dtype)
        return self._rounded[: tile.numel()].view(tile.shape)

    def strip_buffer(self, strip: Tensor) -> Tensor:
        return self._strip[: strip.numel()].view(strip.shape)

    def waiting(self, kept: Tensor | None, tokens: slice, words: slice) -> Tensor | None:
        """Return where the logits of a tile wait, f[t, v], if they do."""
        if kept is None or tokens.start:
            return None
        shape = (self._first, _size(words))
        return kept[words].view(-1)[: shape[0] * shape[1]].view(shape)

    def make(self, tokens: slice, words: slice, into: Tensor) -> Tensor:
        """Make logits, f[t, v]."""
        head = self.head
        left, right = self.states[tokens], self.weight[words].T
        if into.dtype == left.dtype or self.is_rounded:
            multiply(left, right, into)
        else:
            into.copy_(left @ right)
        if head.bias is not None:
            into += head.bias[words]
        if head.temperatures is not None:
            into /= head.temperatures[tokens]
        first, last = (bisect_left(self._banned_ids, word) for word in (words.start, words.stop))
        if first < last:
            into.index_fill_(1, self._banned[first:last] - words.start, BANNED)
        return into

    def targets(self, tokens: slice, words: slice) -> tuple[Tensor, Tensor]:
        """Return whether each token of a tile has its target in it, bool[t, 1], and its column.

        Columns are i64[t, 1], of other tokens any one.
        """
        columns = self.head.targets[tokens, None] - words.start
        count = _size(words)
        return (columns >= 0) & (columns < count), columns.clamp(0, count - 1)


def multiply(left: Tensor, right: Tensor, into: Tensor, *, adds_up: bool = False) -> None:
    """Put the product of two matrices where there is room, or add it to what is there.

    Matrices of another type than the sums are for a GPU: see `_may_round`.

    oneDNN has no way to write into a tile; that its product is copied costs less than it saves.
    """
    if left.dtype != into.dtype:
        wider: Any = {"out_dtype": into.dtype, "out": into}
        _ = torch.addmm(into, left, right, **wider) if adds_up else torch.mm(left, right, **wider)
    elif left.dtype == torch.float32 and left.device.type == "cpu" and onednn_is_faster():
        found = product(left, right)
        _ = into.add_(found) if adds_up else into.copy_(found)
    elif adds_up:
        into.addmm_(left, right)
    else:
        torch.mm(left, right, out=into)


def _may_round(hidden: Tensor, weight: Tensor) -> bool:
    is_f32 = hidden.dtype == weight.dtype == torch.float32
    may_be_tf32 = hidden.is_cuda and bool(torch.backends.cuda.matmul.allow_tf32)
    return is_f32 and may_be_tf32


def cuts(count: int, size: int, *, start: int = 0) -> tuple[slice, ...]:
    """Cut a range into slices of a size; the last may be smaller."""
    return tuple(slice(at, min(at + size, count)) for at in range(start, count, size))


def _size(cut: slice) -> int:
    return cut.stop - cut.start


def fused_logprobs(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of tokens.

    Args:
        hidden: f[k, H], what the output layer reads for each token.
        head: The output layer.

    Returns:
        f[k] with a gradient where that is enabled, and f[k] without; entropies in nats. At least
        f32, as are all sums.
    """
    return cast("Any", _Fused).apply(hidden, head.weight, head.bias, Tiles(hidden, head))


def _fits_logits(head: Head) -> bool:
    """Return whether the weight gets a new gradient that has room for a tile of logits.

    A tile of few tokens costs more time than there is in making it again.
    """
    is_wanted = torch.is_grad_enabled() and head.weight.requires_grad
    is_wide = head.weight.dtype.itemsize >= torch.float32.itemsize
    enough = min(len(head.targets), head.tiling.token_count // 8)
    is_worth_it = head.weight.shape[1] >= enough
    return is_wanted and is_wide and is_worth_it and head.sum_of_gradients is None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles
    ) -> tuple[Tensor, Tensor]:
        chosen, norms, entropies = _softmax_sums(tiles)
        # Saved so that a change in place of weights that are still needed is noticed.
        ctx.save_for_backward(hidden, weight, bias, norms)
        ctx.tiles = tiles
        ctx.mark_non_differentiable(entropies)
        return chosen - norms, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        norms, tiles = ctx.saved_tensors[-1], ctx.tiles
        # A second way back would find gradients where logits were.
        kept, tiles.kept = tiles.kept, None
        scale = upstream[0][:, None]
        if tiles.head.temperatures is not None:
            scale = scale / tiles.head.temperatures
        return (*_gradients(tiles, kept, norms, scale, ctx.needs_input_grad), None)


def _softmax_sums(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Look at every tile once.

    The running form with a rising maximum is that of arXiv 1805.02867, algorithm 3.

    Returns:
        f[k] each: the logits of targets, logs of the denominators, and entropies in nats.
    """
    most = tiles.hidden.new_full((len(tiles.hidden),), BANNED, dtype=tiles.dtype)
    # Sums of exp(l - most), and of (l - most) exp(l - most).
    mass, mean, chosen = (torch.zeros_like(most) for _ in range(3))
    for words, tokens in itertools.product(tiles.words, tiles.tokens):
        room = tiles.tile_buffer(tokens, words)
        place = tiles.waiting(tiles.kept, tokens, words)
        logits = tiles.make(tokens, words, room if place is None else place)
        is_here, columns = tiles.targets(tokens, words)
        found = torch.where(is_here, logits.gather(1, columns), chosen[tokens, None])
        chosen[tokens] = found[:, 0]
        for rows in cuts(_size(tokens), tiles.strip_rows):
            some = slice(tokens.start + rows.start, tokens.start + rows.stop)
            # They may be the logits themselves.
            less, shares = room[rows], tiles.strip_buffer(room[rows])
            top = torch.maximum(most[some], logits[rows].amax(1))
            torch.sub(logits[rows], top[:, None], out=less)
            torch.exp(less, out=shares)
            step = most[some] - top
            fade = step.exp()
            mean[some] = fade * (mean[some] + step * mass[some])
            mass[some] = fade * mass[some] + shares.sum(1)
            mean[some] += shares.mul_(less).sum(1)
            most[some] = top
    return chosen, most + mass.log(), mass.log() - mean / mass


def _gradients(
    tiles: Tiles, kept: Tensor | None, norms: Tensor, scale: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias; None: not wanted, or added already.

    Of logits they are d logprob / d logits = onehot(target) - softmax, over the temperature.

    Args:
        tiles: Makes the logits.
        kept: Those that are not made again.
        norms: f[k], of the softmax.
        scale: f[k, 1], gradient of the log-probability over the temperature.
        wanted: Which of the three.
    """
    hidden, head = tiles.hidden, tiles.head
    by_hidden = torch.zeros_like(hidden, dtype=tiles.dtype) if wanted[0] else None
    by_weight, is_new = _by_weight(head, kept) if wanted[1] else (None, False)
    by_bias = None if head.bias is None else torch.zeros_like(head.bias)
    for words in tiles.words:
        sums = None if by_weight is None else by_weight[words].to(tiles.dtype)
        for tokens in tiles.tokens:
            tile, waiting = tiles.tile_buffer(tokens, words), tiles.waiting(kept, tokens, words)
            logits = tiles.make(tokens, words, tile) if waiting is None else waiting
            torch.sub(logits, norms[tokens, None], out=tile).exp_()
            is_here, columns = tiles.targets(tokens, words)
            at_targets = scale[tokens] * (is_here.to(tile.dtype) - tile.gather(1, columns))
            slopes = tiles.slopes_buffer(tile)
            torch.mul(tile, -scale[tokens], out=slopes)
            slopes.scatter_(1, columns, at_targets.to(slopes.dtype))
            if by_hidden is not None:
                _add_product(by_hidden[tokens], slopes, tiles.weight[words])
            if sums is not None:
                if is_new and tokens.start == 0:
                    # Not before: the tile's logits may have waited here.
                    sums.zero_()
                _add_product(sums, slopes.T, tiles.states[tokens])
            if by_bias is not None:
                by_bias[words] += slopes.sum(0, dtype=by_bias.dtype)
        if by_weight is not None and sums is not None and sums.dtype != by_weight.dtype:
            by_weight[words] = sums
    return (
        None if by_hidden is None else by_hidden.to(hidden.dtype),
        by_weight if is_new else None,
        by_bias,
    )


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices, in the type of the right one."""
    if right.dtype in (into.dtype, left.dtype):
        multiply(left, right, into, adds_up=True)
    else:
        into += left.to(right.dtype) @ right


def _by_weight(head: Head, kept: Tensor | None) -> tuple[Tensor, bool]:
    """Return where the weight's gradient adds up, and whether nothing is there yet."""
    there = head.sum_of_gradients if kept is None else None
    if there is not None:
        return there, False
    return torch.empty_like(head.weight) if kept is None else kept, True
