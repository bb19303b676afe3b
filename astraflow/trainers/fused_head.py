"""Log-probabilities and entropies straight from hidden states: no logits of a whole pass.

The output layer of a large vocabulary makes logits many times the size of its input. Here they
exist one tile (some tokens by some of the vocabulary) at a time: the forward pass keeps running
sums of each token's softmax, the backward pass makes each tile again. That is a fourth product
of matrices beside the three of plain logits. It is saved for the first tokens, whose logits wait
in the array that the weight's gradient will take: as many tokens as a hidden state has numbers.

Tiles are as large as memory allows. Threads share each product and wait for each other after it,
so the fewer products there are, the less is lost. Which tokens have their target in a tile is no
question to the device: on a GPU nothing waits between the first tile and the last.
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
        tiling: Of the logits.
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


class KeptLogits:
    """Logits of the first tokens, which wait where the weight's gradient will be.

    The H numbers of each word have room for the logits of H tokens at that word.

    Attributes:
        room: f[V, H].
        token_count: How many tokens that is.
    """

    def __init__(self, head: Head) -> None:
        """Make room.

        Args:
            head: Whose logits.
        """
        self.buffer = torch.empty_like(head.weight)
        self.token_count = min(len(head.targets), head.weight.shape[1])

    def at(self, tokens: slice, words: slice) -> Tensor | None:
        """Return where the logits of a tile wait, f[t, v], if they do."""
        if tokens.stop > self.token_count:
            return None
        shape = (self.token_count, words.stop - words.start)
        return self.buffer[words].view(-1)[: shape[0] * shape[1]].view(shape)


class Tiles:
    """Makes one tile after the other, words first.

    Attributes:
        hidden: f[k, H], what the output layer reads.
        head: The output layer.
        dtype: Of logits, and of all that is summed up: f32 where the rest is bf16.
        tokens: How they are cut up.
        words: How the vocabulary is cut up.
    """

    def __init__(self, hidden: Tensor, head: Head, *, first_count: int = 0) -> None:
        """Make room for a tile and a strip of one.

        Args:
            hidden: f[k, H], what the output layer reads.
            head: The output layer.
            first_count: Tokens that are the first tile; 0: no more than are in others.
        """
        self.hidden = hidden
        self.head = head
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        size = head.tiling.token_count
        first = first_count or min(size, len(hidden))
        self.tokens = (slice(0, first), *cuts(len(hidden), size, start=first))
        self.words = cuts(len(head.weight), head.tiling.word_count)
        columns = _size(self.words[0])
        rows = max(map(_size, self.tokens))
        self._tile = hidden.new_empty(rows * columns, dtype=self.dtype)
        most = _STRIP_ELEMENTS.get(hidden.device.type, rows * columns)
        self._strip_rows = min(rows, max(1, most // columns))
        self._strip = hidden.new_empty(self._strip_rows * columns, dtype=self.dtype)
        self._banned = head.banned.to(hidden.device)
        self._banned_ids: list[int] = cast("Any", head.banned).tolist()

    def tile_buffer(self, tokens: slice, words: slice) -> Tensor:
        """Return the room of a tile, f[t, v]."""
        rows, columns = _size(tokens), _size(words)
        return self._tile[: rows * columns].view(rows, columns)

    def strips(self, tokens: slice) -> tuple[slice, ...]:
        """Cut the rows of a tile up, so that a strip stays near a core while it is worked on."""
        return cuts(_size(tokens), self._strip_rows)

    def strip_buffer(self, strip: Tensor) -> Tensor:
        """Return room for as much as a strip."""
        return self._strip[: strip.numel()].view(strip.shape)

    def make(self, tokens: slice, words: slice, into: Tensor) -> Tensor:
        """Make logits, f[t, v]."""
        head = self.head
        if into.dtype == self.hidden.dtype:
            multiply(self.hidden[tokens], head.weight[words].T, into)
        else:
            into.copy_(self.hidden[tokens] @ head.weight[words].T)
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
    """Put the product of two matrices of one type where there is room, or add it to what is there.

    oneDNN has no way to write into a tile; that its product is copied costs less than it saves.
    """
    if left.dtype == torch.float32 and left.device.type == "cpu" and onednn_is_faster():
        found = product(left, right)
        _ = into.add_(found) if adds_up else into.copy_(found)
    elif adds_up:
        into.addmm_(left, right)
    else:
        torch.mm(left, right, out=into)


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
    kept = KeptLogits(head) if _fits_logits(head) else None
    tiles = Tiles(hidden, head, first_count=kept.token_count if kept else 0)
    apply = cast("Any", _Fused).apply
    return apply(hidden, head.weight, head.bias, _Way(tiles=tiles, kept=kept))


def _fits_logits(head: Head) -> bool:
    """Return whether the weight gets a new gradient that has room for a tile of logits.

    A tile of few tokens costs more time than there is in making it again.
    """
    is_wanted = torch.is_grad_enabled() and head.weight.requires_grad
    is_wide = head.weight.dtype.itemsize >= torch.float32.itemsize
    enough = min(len(head.targets), head.tiling.token_count // 8)
    is_worth_it = head.weight.shape[1] >= enough
    return is_wanted and is_wide and is_worth_it and head.sum_of_gradients is None


@dataclass(slots=True, kw_only=True, eq=False)
class _Way:
    """What the way there leaves to the way back.

    Attributes:
        tiles: Makes logits.
        kept: Those that need not be made again; None: all.
    """

    tiles: Tiles
    kept: KeptLogits | None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, way: _Way
    ) -> tuple[Tensor, Tensor]:
        sums = _Sums(way.tiles)
        sums.add_all(way.tiles, way.kept)
        norms, entropies = sums.norms, sums.entropies
        # Saved so that a change in place of weights that are still needed is noticed.
        ctx.save_for_backward(hidden, weight, bias, norms)
        ctx.way = way
        ctx.mark_non_differentiable(entropies)
        return sums.chosen - norms, entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        norms = ctx.saved_tensors[-1]
        tiles, kept = ctx.way.tiles, ctx.way.kept
        # A second way back would find gradients where logits were.
        ctx.way.kept = None
        scale = upstream[0][:, None]
        if tiles.head.temperatures is not None:
            scale = scale / tiles.head.temperatures
        pulls = _Pulls(tiles=tiles, norms=norms, scale=scale)
        return (*_gradients(pulls, kept, ctx.needs_input_grad), None)


class _Sums:
    """What is known of the softmax of each token, tile by tile.

    The running form with a rising maximum is that of arXiv 1805.02867, algorithm 3.
    """

    def __init__(self, tiles: Tiles) -> None:
        self._most = tiles.hidden.new_full((len(tiles.hidden),), BANNED, dtype=tiles.dtype)
        # Sums of exp(l - most), and of (l - most) exp(l - most).
        self._mass, self._mean = torch.zeros_like(self._most), torch.zeros_like(self._most)
        self.chosen = torch.zeros_like(self._most)

    @property
    def norms(self) -> Tensor:
        """f[k], logs of the denominators."""
        return self._most + self._mass.log()

    @property
    def entropies(self) -> Tensor:
        """f[k], nats."""
        return self._mass.log() - self._mean / self._mass

    def add_all(self, tiles: Tiles, kept: KeptLogits | None) -> None:
        """Look at every tile once."""
        for words, tokens in itertools.product(tiles.words, tiles.tokens):
            room = tiles.tile_buffer(tokens, words)
            place = None if kept is None else kept.at(tokens, words)
            logits = tiles.make(tokens, words, room if place is None else place)
            is_here, columns = tiles.targets(tokens, words)
            found = torch.where(is_here, logits.gather(1, columns), self.chosen[tokens, None])
            self.chosen[tokens] = found[:, 0]
            for rows in tiles.strips(tokens):
                shares = tiles.strip_buffer(room[rows])
                self._add(_within(tokens, rows), logits[rows], room[rows], shares)

    def _add(self, tokens: slice, logits: Tensor, less: Tensor, shares: Tensor) -> None:
        """Add a strip; `less` may be the logits themselves."""
        most, mass = self._most[tokens], self._mass[tokens]
        top = torch.maximum(most, logits.amax(1))
        torch.sub(logits, top[:, None], out=less)
        torch.exp(less, out=shares)
        step = most - top
        fade = step.exp()
        self._mean[tokens] = fade * (self._mean[tokens] + step * mass)
        self._mass[tokens] = fade * mass + shares.sum(1)
        self._mean[tokens] += shares.mul_(less).sum(1)
        self._most[tokens] = top


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pulls:
    """The gradients of logits.

    d logprob / d logits = onehot(target) - softmax, over the temperature.

    Attributes:
        tiles: Makes the logits.
        norms: f[k], of the softmax.
        scale: f[k, 1], gradient of the log-probability over the temperature.
    """

    tiles: Tiles
    norms: Tensor
    scale: Tensor

    def make(self, tokens: slice, words: slice, kept: KeptLogits | None) -> Tensor:
        """Return those of a tile, f[t, v], of which nothing waits among the kept any more."""
        pulls, norms, scale = (
            self.tiles.tile_buffer(tokens, words),
            self.norms[tokens],
            self.scale[tokens],
        )
        waiting = None if kept is None else kept.at(tokens, words)
        logits = self.tiles.make(tokens, words, pulls) if waiting is None else waiting
        torch.sub(logits, norms[:, None], out=pulls).exp_().mul_(-scale)
        is_here, columns = self.tiles.targets(tokens, words)
        pulls.scatter_(1, columns, pulls.gather(1, columns) + is_here * scale)
        return pulls


def _gradients(
    pulls: _Pulls, kept: KeptLogits | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of hidden states, weight and bias; None: not wanted, or added already.

    Args:
        pulls: Those of the logits.
        kept: Logits that are not made again.
        wanted: Which of the three.
    """
    hidden, head = pulls.tiles.hidden, pulls.tiles.head
    by_hidden = torch.zeros_like(hidden, dtype=pulls.tiles.dtype) if wanted[0] else None
    by_weight, is_new = _by_weight(head, kept) if wanted[1] else (None, False)
    by_bias = None if head.bias is None else torch.zeros_like(head.bias)
    for words in pulls.tiles.words:
        sums = None if by_weight is None else by_weight[words].to(pulls.tiles.dtype)
        for tokens in pulls.tiles.tokens:
            tile = pulls.make(tokens, words, kept)
            if by_hidden is not None:
                _add_product(by_hidden[tokens], tile, head.weight[words])
            if sums is not None:
                if is_new and tokens.start == 0:
                    # Not before: the tile's logits may have waited here.
                    sums.zero_()
                _add_product(sums, tile.T, hidden[tokens])
            if by_bias is not None:
                by_bias[words] += tile.sum(0)
        if by_weight is not None and sums is not None and sums.dtype != by_weight.dtype:
            by_weight[words] = sums
    return (
        None if by_hidden is None else by_hidden.to(hidden.dtype),
        by_weight if is_new else None,
        by_bias,
    )


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices, in the type of the right one."""
    if into.dtype == right.dtype:
        multiply(left, right, into, adds_up=True)
    else:
        into += left.to(right.dtype) @ right


def _by_weight(head: Head, kept: KeptLogits | None) -> tuple[Tensor, bool]:
    """Return where the weight's gradient adds up, and whether nothing is there yet."""
    if kept is not None:
        return kept.buffer, True
    there = head.sum_of_gradients
    return (torch.empty_like(head.weight), True) if there is None else (there, False)


def _within(outer: slice, inner: slice) -> slice:
    """Return what a part of a slice is in the whole."""
    return slice(outer.start + inner.start, outer.start + inner.stop)
