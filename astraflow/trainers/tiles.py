"""Tiles: the logits of some tokens at some of the vocabulary, made in room that is used again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from astraflow.engines.products import onednn_is_faster, product

# The logit of a word that is never drawn: finite, so that 0 times it is 0.
BANNED = -1e30
# Of a strip: 2 MiB in f32.
_STRIP_ELEMENTS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How large a tile is: 8 MiB in f32. There is one at a time.

    Attributes:
        token_count: Tokens in it, but for those whose logits are kept: all these are one tile.
        word_count: Of the vocabulary.
    """

    token_count: int = 2048
    word_count: int = 1024


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


class Kept:
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
        self.room = torch.empty_like(head.weight)
        self.token_count = min(len(head.targets), head.weight.shape[1])

    def at(self, tokens: slice, words: slice) -> Tensor | None:
        """Return where the logits of a tile wait, f[t, v], if they do."""
        if tokens.stop > self.token_count:
            return None
        shape = (self.token_count, words.stop - words.start)
        return self.room[words].view(-1)[: shape[0] * shape[1]].view(shape)


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
        self._strip_rows = max(1, _STRIP_ELEMENTS // columns)
        self._strip = hidden.new_empty(self._strip_rows * columns, dtype=self.dtype)

    def room(self, tokens: slice, words: slice) -> Tensor:
        """Return the room of a tile, f[t, v]."""
        rows, columns = _size(tokens), _size(words)
        return self._tile[: rows * columns].view(rows, columns)

    def strips(self, tokens: slice) -> tuple[slice, ...]:
        """Cut the rows of a tile up, so that a strip stays near a core while it is worked on."""
        return cuts(_size(tokens), self._strip_rows)

    def strip_room(self, strip: Tensor) -> Tensor:
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
        banned = head.banned[(head.banned >= words.start) & (head.banned < words.stop)]
        return into.index_fill_(1, banned - words.start, BANNED) if len(banned) else into

    def targets(self, tokens: slice, words: slice) -> tuple[Tensor, Tensor]:
        """Return which tokens of a tile have their target in it, and in which column."""
        some = self.head.targets[tokens]
        at = torch.nonzero((some >= words.start) & (some < words.stop))[:, 0]
        return at, some[at] - words.start


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
