"""Log-probabilities of the tokens of a batch under a model, pass by pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from astraflow.trainers.causal_model import Branches, CausalModel, Layout
from astraflow.trainers.fused_head import Head, Tiling, fused_logprobs
from astraflow.trainers.packed_rows import PackedRows
from astraflow.trainers.passes import ModelPass
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.tensors import to_tensor

if TYPE_CHECKING:
    from astraflow.trainers.context_parallel import RowGroup

Compute = Callable[[CausalModel, "PassTokens"], tuple[Tensor, Tensor]]

# Elements of the logits that the entropy looks at in one go: 64 MiB in f32.
_ENTROPY_ELEMENTS = 1 << 24
# Logits of a pass that are never made whole; fewer are, which takes a quarter less arithmetic.
_FUSED_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTokens:
    """One pass, ready for a model.

    Attributes:
        tokens: i64[n, L], padded on the right.
        chosen: i64[k], flat indices of the positions that predict a token of the loss; where rows
            share tokens, one position may predict several.
        targets: i64[k], those tokens.
        loss_indices: i64[k], where each stands in `LossTokens`.
        temperatures: f32[k, 1], by which the logits are divided; None: all 1.
        routed_experts: u16[n * L, layers, k], which experts each token takes; None: its own.
        positions: i64[n, L], of each token in its row, and
        ends: i64[n, L], as in `Branches`; None: no row branches off another.
        slots: i64[t], flat indices of what is no padding.
        row_lengths: i64[m], of rows that follow each other in one; None: rows are padded.
    """

    tokens: np.ndarray
    chosen: np.ndarray
    targets: np.ndarray
    loss_indices: np.ndarray
    temperatures: np.ndarray | None
    routed_experts: np.ndarray | None = None
    positions: np.ndarray | None = None
    ends: np.ndarray | None = None
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    row_lengths: np.ndarray | None = None

    @classmethod
    def of(cls, rows: TrainRows, one: ModelPass) -> "PassTokens":
        """Gather the rows of a pass; one without rows has a token to compute, and no loss."""
        if not len(one.rows):
            return cls.nothing()
        sources, positions, ends, paths = _laid_out(rows, one)
        bounds = np.searchsorted(rows.loss.positions, rows.offsets)
        spans = [slice(bounds[row], bounds[row + 1]) for row in one.rows]
        loss_indices = np.concatenate([np.arange(len(rows.loss))[span] for span in spans])
        chosen = [
            path[rows.loss.positions[span] - rows.offsets[row] - 1]
            for row, path, span in zip(one.rows, paths, spans, strict=True)
        ]
        temperatures = rows.loss.temperatures[loss_indices]
        return cls(
            # The first token of a row stands in for padding: valid for every model.
            tokens=rows.tokens[sources].astype(np.int64),
            chosen=np.concatenate(chosen),
            targets=rows.tokens[rows.loss.positions[loss_indices]].astype(np.int64),
            loss_indices=loss_indices,
            temperatures=temperatures[:, None] if (temperatures != 1).any() else None,
            routed_experts=None
            if rows.routed_experts is None
            else rows.routed_experts[sources.ravel()],
            positions=positions if one.has_branches else None,
            ends=ends if one.has_branches else None,
            slots=np.unique(np.concatenate(paths)),
            row_lengths=rows.lengths[one.rows] if one.is_packed else None,
        )

    def where(self, here: np.ndarray) -> "PassTokens":
        """Return the pass with some of its loss tokens, i64[k]; `chosen` is left."""
        return replace(
            self,
            targets=self.targets[here],
            loss_indices=self.loss_indices[here],
            temperatures=None if self.temperatures is None else self.temperatures[here],
        )

    @classmethod
    def nothing(cls) -> "PassTokens":
        """Return what a rank computes that has no rows left while others have."""
        none = np.zeros(0, np.int64)
        tokens = np.zeros((1, 1), np.int64)
        return cls(tokens=tokens, chosen=none, targets=none, loss_indices=none, temperatures=None)

    @classmethod
    def of_few(cls, model: CausalModel) -> "PassTokens":
        """Return a row of a few tokens, to ask a model with."""
        tokens = np.arange(min(8, model.vocabulary_size))
        places = tokens[:-1]
        return cls(
            tokens=tokens[None],
            chosen=places,
            targets=tokens[1:],
            loss_indices=places,
            temperatures=None,
        )


def _laid_out(
    rows: TrainRows, one: ModelPass
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Lay the rows of a pass out, each from where it leaves the one before it.

    Returns:
        Of each slot i64[n, L]: which token of the batch it holds, of padding the first one of its
        tree; where that stands in its row, of padding 0; and the end, as in `Branches`. Of each
        row of the pass i64[tokens], flat indices of the slots of its tokens.
    """
    shape = (one.sequence_count, one.length)
    positions = np.zeros(shape, np.int64)
    # What is packed has no padding to stand in for.
    first_rows = one.rows[one.shared_counts == 0][: shape[0]]
    sources = np.repeat(rows.offsets[first_rows][:, None], one.length, axis=1)
    flat_ends = np.arange(1, positions.size + 1)
    paths: list[np.ndarray] = []
    tree, slot = -1, 0
    path: np.ndarray = np.zeros(0, np.int64)
    for row, shared in zip(map(int, one.rows), map(int, one.shared_counts), strict=True):
        flat_ends[path[shared:]] = slot
        if not (shared or one.is_packed):
            tree += 1
            slot = tree * one.length
        count = int(rows.offsets[row + 1] - rows.offsets[row]) - shared
        new = slot + np.arange(count)
        sources.reshape(-1)[new] = np.arange(count) + rows.offsets[row] + shared
        positions.reshape(-1)[new] = np.arange(count) + shared
        path = np.concatenate([path[:shared], new])
        paths.append(path)
        slot += count
    flat_ends[path] = slot
    starts = np.arange(shape[0])[:, None] * one.length
    return sources, positions, flat_ends.reshape(shape) - starts, paths


@dataclass(slots=True, kw_only=True, eq=False)
class Likelihoods:
    """What a model says of the loss tokens of a batch, in their order.

    Attributes:
        logprobs: f32[K].
        entropies: f32[K], nats.
        imbalance: Of its routers, where a loss is made of that.
    """

    logprobs: np.ndarray
    entropies: np.ndarray
    imbalance: float = 0.0

    @classmethod
    def empty(cls, count: int) -> "Likelihoods":
        return cls(logprobs=np.zeros(count, np.float32), entropies=np.zeros(count, np.float32))

    def put(self, indices: np.ndarray, logprobs: Tensor, entropies: Tensor) -> None:
        self.logprobs[indices] = logprobs.detach().cpu().numpy()
        self.entropies[indices] = entropies.detach().cpu().numpy()

    def where(self, indices: np.ndarray) -> "Likelihoods":
        return Likelihoods(logprobs=self.logprobs[indices], entropies=self.entropies[indices])


def log_softmax_of(
    model: CausalModel,
    one: PassTokens,
    *,
    fuse_above: int = _FUSED_ELEMENTS,
    needs_entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the loss tokens of a pass.

    Of a reward model or a critic it is what it scores the tokens before them, and 0.

    Args:
        model: Whose.
        one: The pass.
        fuse_above: More logits than that are never made whole, if the model's are its head's.
        needs_entropy_gradient: For a loss that is made of entropies, too.

    Returns:
        f32[k] with a gradient where that is enabled, and f32[k], with one where it is needed.
    """
    compute: Compute = _scores
    if not model.makes_scores:
        compute = partial(
            _log_softmax,
            banned=_banned(model.never_sampled, one.targets),
            fuse_above=fuse_above,
            needs_entropy_gradient=needs_entropy_gradient,
        )
    return _shared_out(compute, model, one, model.row_groups)


def _shared_out(
    compute: Compute, model: CausalModel, one: PassTokens, groups: Sequence["RowGroup"]
) -> tuple[Tensor, Tensor]:
    """Compute what the groups leave to this rank of a pass, and return what all of them found."""
    if not groups:
        return compute(model, one)
    part, here = groups[0].part_of(one)
    found = _shared_out(compute, model, part, groups[1:])
    logprobs, entropies = (groups[0].joined(each, here, len(one.targets)) for each in found)
    return logprobs, entropies


def _log_softmax(
    model: CausalModel,
    one: PassTokens,
    *,
    banned: Tensor,
    fuse_above: int,
    needs_entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    device = model.device
    tokens, chosen = to_tensor(one.tokens, device), to_tensor(one.chosen, device)
    targets = to_tensor(one.targets, device)
    temperatures = None if one.temperatures is None else to_tensor(one.temperatures, device)
    layout = _layout_of(one, device)
    layer = model.linear_head if len(targets) * model.vocabulary_size > fuse_above else None
    model.routes.expect(one.routed_experts)
    if layer is not None:

        def read(hidden: Tensor) -> tuple[Tensor, Tensor]:
            if needs_entropy_gradient:
                return _by_tiles(hidden, layer, targets, temperatures, banned)
            head = Head(
                weight=layer.weight,
                bias=layer.bias,
                targets=targets,
                temperatures=temperatures,
                banned=banned,
                tiling=Tiling.of(device),
                adds_up=True,
            )
            return fused_logprobs(hidden, head)

        return model.at_head(tokens, chosen, read, layout=layout)
    found = model.logits(tokens, chosen, layout=layout)
    logits = _drawn_from(found, temperatures, banned)
    norms = logits.logsumexp(-1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - norms
    if needs_entropy_gradient:
        return logprobs, _entropies(logits, norms)
    return logprobs, _entropies(logits.detach(), norms.detach())


def _scores(model: CausalModel, one: PassTokens) -> tuple[Tensor, Tensor]:
    """Return f32[k], what a reward model or a critic says, and zeros."""
    device = model.device
    tokens, chosen = to_tensor(one.tokens, device), to_tensor(one.chosen, device)
    model.routes.expect(None)
    found = model.logits(tokens, chosen, layout=_layout_of(one, device)).float()[:, 0]
    return found, torch.zeros_like(found)


def _layout_of(one: PassTokens, device: torch.device) -> Layout:
    if one.row_lengths is not None:
        return PackedRows.of(one.row_lengths, device)
    if one.positions is None or one.ends is None:
        return None
    positions, ends = to_tensor(one.positions, device), to_tensor(one.ends, device)
    return Branches(positions=positions, ends=ends)


def _by_tiles(
    hidden: Tensor,
    layer: nn.Linear,
    targets: Tensor,
    temperatures: Tensor | None,
    banned: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return f32[k] and f32[k], log-probabilities and entropies, and keep no logits for either.

    Args:
        hidden: [k, H], the output layer's input.
        layer: That one.
        targets: i64[k].
        temperatures: f32[k, 1]; None: all 1.
        banned: Ids that are never drawn.
    """
    # The weight as it is now: of one that ranks share out, all of it.
    weight, bias = layer.weight, layer.bias

    def tile(some: Tensor, wanted: Tensor, divisors: Tensor | None) -> tuple[Tensor, Tensor]:
        made = nn.functional.linear(some.to(weight.dtype), weight, bias)
        logits = _drawn_from(made, divisors, banned)
        norms = logits.logsumexp(-1)
        return logits.gather(1, wanted[:, None])[:, 0] - norms, _entropies(logits, norms)

    again: Any = cast("Any", torch.utils.checkpoint).checkpoint
    size = max(1, _ENTROPY_ELEMENTS // len(weight))
    parts: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(targets), size):
        some = slice(start, start + size)
        divisors = None if temperatures is None else temperatures[some]
        parts.append(again(tile, hidden[some], targets[some], divisors, use_reentrant=False))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _drawn_from(logits: Tensor, temperatures: Tensor | None, banned: Tensor) -> Tensor:
    """Return f32 logits of what tokens were drawn from: scaled, without what is never drawn."""
    logits = logits.float()
    if len(banned):
        logits = logits.index_fill(1, banned.to(logits.device), -torch.inf)
    return logits if temperatures is None else logits / temperatures


def _banned(never_sampled: Tensor, targets: np.ndarray) -> Tensor:
    """Return what is never drawn, except what another engine did draw; both on the host."""
    return never_sampled[~torch.isin(never_sampled, to_tensor(targets))]


def _entropies(logits: Tensor, norms: Tensor) -> Tensor:
    """Return f32[k], entropies in nats; logits of -inf count as impossible."""
    step = max(1, _ENTROPY_ELEMENTS // logits.shape[1])
    parts: list[Tensor] = []
    for start in range(0, len(logits), step):
        some = slice(start, start + step)
        logprobs = logits[some] - norms[some, None]
        parts.append(-(logprobs.exp() * logprobs.clamp_min(-1e30)).sum(-1))
    return torch.cat(parts) if parts else norms
