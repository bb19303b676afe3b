"""Passes: which rows go through the model together.

Packed, all rows of a pass are one, end to end, and attention ends where a row does: no token is
padding. It takes a kernel for rows of any lengths, which GPUs have, and a model in which nothing
but attention mixes tokens (`packed_rows`).

Elsewhere rows of like length are padded on the right to one length. A causal model never looks to
the right, so padding changes nothing before it, no mask is needed, and the fastest causal
attention kernel serves.

Rows that begin with the same tokens (the rollouts of a group share their prompt, the turns of an
episode what was said before) can go as a tree: what they share is computed once, forward and
backward, and a mask lets each token see its own row alone. Attention is quadratic in the tokens
of a tree, so a batch is cut into trees that are worth it, and trees of like size are padded to one
pass as rows are.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import structlog

from astraflow.config.policies import Packing, SharePrefixes
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import TrainRows, scatter

if TYPE_CHECKING:
    from astraflow.trainers.causal_model import CausalModel

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# What a further pass costs, in padded tokens. Measured on one core: 25 us per token and 4 ms per
# pass with 0.24 M parameters; it fades as models grow.
PASS_OVERHEAD_TOKENS = 192


# No tree is longer: its mask is quadratic.
_TREE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPass:
    """Rows that go through the model together, each alone or in trees.

    Attributes:
        rows: i64[m], indices of rows; those of a tree follow each other, small trees come first.
        length: To which each tree is padded; a row alone is a tree of one. Packed: of all rows.
        shared_counts: i64[m], first tokens that a row has from the one before it, in its tree;
            0: a tree begins.
        is_packed: Whether rows follow each other as one, without padding.
    """

    rows: np.ndarray
    length: int
    shared_counts: np.ndarray
    is_packed: bool = False

    @classmethod
    def of(cls, rows: np.ndarray, length: int, *, is_packed: bool = False) -> "ModelPass":
        """Return a pass of rows that share nothing."""
        shares = np.zeros(len(rows), np.int64)
        return cls(rows=rows, length=length, shared_counts=shares, is_packed=is_packed)

    @property
    def sequence_count(self) -> int:
        """What the model has for rows, n: trees and rows alone; one of all that is packed."""
        return 1 if self.is_packed else int(np.count_nonzero(self.shared_counts == 0))

    @property
    def has_branches(self) -> bool:
        return bool(self.shared_counts.any())

    @property
    def padded_token_count(self) -> int:
        """Tokens computed, padding included."""
        return self.sequence_count * self.length


def plan_passes(
    lengths: np.ndarray,
    *,
    max_tokens: int,
    overhead_tokens: int = PASS_OVERHEAD_TOKENS,
) -> tuple[ModelPass, ...]:
    """Share rows out over passes so that padding and passes together cost least.

    Cuts lie between different lengths; a stretch that does not fit a pass is cut evenly.
    A row longer than `max_tokens` makes a pass of its own.

    Args:
        lengths: i64[N], tokens of each row, at least 1.
        max_tokens: Of one pass, padding included.
        overhead_tokens: What a pass costs beside its tokens.

    Returns:
        The same plan for the same lengths, shortest rows first.

    Example:
        >>> plan = plan_passes(np.array([9, 100, 8]), max_tokens=1000, overhead_tokens=50)
        >>> [(p.rows.tolist(), p.length) for p in plan]
        [([2, 0], 9), ([1], 100)]
    """
    order = np.argsort(lengths, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(lengths[order])) + 1, len(order))
    if not len(order):
        return ()
    cuts = _cheapest_cuts(
        ends, lengths[order][ends - 1], max_tokens=max_tokens, overhead_tokens=overhead_tokens
    )
    plan: list[ModelPass] = []
    for start, end in cuts:
        fitting = max(1, max_tokens // int(lengths[order[end - 1]]))
        parts = np.array_split(order[start:end], -(-(end - start) // fitting))
        plan += [ModelPass.of(rows, int(lengths[rows[-1]])) for rows in parts]
    return tuple(plan)


def pack(lengths: np.ndarray, *, max_tokens: int) -> tuple[ModelPass, ...]:
    """Share rows out over passes without padding: first fit, longest rows first.

    A row longer than `max_tokens` makes a pass of its own.

    Args:
        lengths: i64[N], tokens of each row, at least 1.
        max_tokens: Of one pass.

    Returns:
        The same plan for the same lengths, fullest passes last.

    Example:
        >>> [one.rows.tolist() for one in pack(np.array([5, 60, 30, 40]), max_tokens=100)]
        [[2, 0], [1, 3]]
    """
    passes: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for row in np.argsort(-lengths, kind="stable").tolist():
        fitting = room[: len(passes)] >= lengths[row]
        at = int(fitting.argmax()) if fitting.any() else len(passes)
        if at == len(passes):
            passes.append([])
            room[at] = max_tokens
        passes[at].append(row)
        room[at] -= lengths[row]
    chosen = [np.array(each, np.int64) for each in reversed(passes)]
    return tuple(ModelPass.of(each, int(lengths[each].sum()), is_packed=True) for each in chosen)


def passes_of(
    rows: TrainRows,
    chosen_rows: np.ndarray,
    *,
    max_tokens: int,
    attention_tokens: float | None = None,
    is_packed: bool = False,
) -> tuple[ModelPass, ...]:
    """Share the chosen rows of a batch out over passes, whatever order they arrived in.

    Sums in single precision depend on their order, and that of arrival depends on timing.

    Args:
        rows: Of the batch.
        chosen_rows: bool[N].
        max_tokens: Of one pass, padding included.
        attention_tokens: So many tokens that a token attends to cost as much as all else that is
            computed for it; None: rows share nothing.
        is_packed: Whether rows that share nothing are packed.
    """
    indices = np.flatnonzero(chosen_rows)
    indices = indices[np.argsort(rows.fingerprints[indices], kind="stable")]
    trees = None
    if attention_tokens is not None:
        trees = _trees_of(rows, indices, max_tokens=max_tokens, attention_tokens=attention_tokens)
    if trees is None:
        plan = (pack if is_packed else plan_passes)(rows.lengths[indices], max_tokens=max_tokens)
        return tuple(replace(one, rows=indices[one.rows]) for one in plan)
    passes: list[ModelPass] = []
    for one in plan_passes(np.array([tree.length for tree in trees]), max_tokens=max_tokens):
        some = [trees[int(each)] for each in one.rows]
        shared_counts = np.concatenate([tree.shared_counts for tree in some])
        joined = np.concatenate([tree.rows for tree in some])
        passes.append(ModelPass(rows=joined, length=one.length, shared_counts=shared_counts))
    return tuple(passes)


class PassPlanner:
    """Shares the rows of batches out over passes, in the way that models compute them best."""

    def __init__(
        self,
        models: Sequence["CausalModel"],
        *,
        max_tokens: int,
        share_prefixes: SharePrefixes = "never",
        packing: Packing = "never",
        peers: Peers = ALONE,
    ) -> None:
        """Ask the models what they can; each has to.

        Rows go as trees, packed, or padded, and the peers make as many passes each.

        Raises:
            AstraflowError: CAPABILITY_MISSING when rows are always to be packed, and a model does
                not take them.
        """
        device = models[0].device.type
        shares = share_prefixes == "always" or (share_prefixes == "auto" and device == "cpu")
        shares = shares and all(each.takes_branches for each in models)
        self._max_tokens = max_tokens
        self._length_bound = min(each.length_bound for each in models)
        self._attention_tokens = models[0].attention_tokens if shares else None
        self._is_packed = packing == "always" or (packing == "auto" and device == "cuda")
        for each in models if self._is_packed else ():
            if why := each.unpacked:
                if packing == "always":
                    raise AstraflowError(
                        Reason.CAPABILITY_MISSING,
                        "trainer.packing: always does not go with "
                        f"{type(each.module).__name__}: {why}; take auto",
                    )
                log.info("rows are padded, not packed", why=why)
                self._is_packed = False
                break
        self._peers = peers

    def plan(self, rows: TrainRows, chosen_rows: np.ndarray) -> tuple[ModelPass, ...]:
        """Return the passes of chosen rows, bool[N], as many on every rank."""
        is_long = rows.lengths > self._length_bound
        plan = [
            one
            for some in (chosen_rows & ~is_long, chosen_rows & is_long)
            if some.any()
            for one in passes_of(
                rows,
                some,
                max_tokens=self._max_tokens,
                # A shared token may have gone through other experts in each of its rows.
                attention_tokens=self._attention_tokens if rows.routed_experts is None else None,
                is_packed=self._is_packed,
            )
        ]
        return evened(plan, self._peers.all_reduce_max(len(plan)))


def minibatches_of(
    rows: TrainRows, *, count: int, epochs: int, peers: Peers = ALONE
) -> Iterator[np.ndarray]:
    """Yield bool[N] for each update of a batch: which of this rank's rows are in it.

    Each epoch deals all rows of all ranks, which make the same calls, out anew into `count` parts,
    prompt by prompt, evenly by rows; rows that are equal stay together. What is in a part depends
    on the rows alone, not on their order or ranks.
    """
    if count == 1:
        yield from [np.ones(rows.row_count, np.bool_)] * epochs
        return
    prompts, contents = rows.prompt_fingerprints, rows.fingerprints
    for epoch in range(epochs):
        keys = np.stack([scatter(prompts + np.uint64(epoch)), contents], axis=1)
        own = [tuple(key) for key in keys.tolist()]
        ordered = sorted(tuple(key) for key in peers.all_gather(keys).tolist())
        places = np.array([bisect_left(ordered, key) for key in own], np.int64)
        parts = places * count // max(1, len(ordered))
        yield from (parts == part for part in range(count))


def evened(plan: Sequence[ModelPass], count: int) -> tuple[ModelPass, ...]:
    """Return a plan of so many passes, so that ranks that share a model make as many.

    Passes without rows come first: then the long ones of all ranks meet.
    """
    nothing = ModelPass.of(np.zeros(0, np.int64), 1)
    return (*[nothing] * (count - len(plan)), *plan)


def _cheapest_cuts(
    ends: np.ndarray, longest: np.ndarray, *, max_tokens: int, overhead_tokens: int
) -> Sequence[tuple[int, int]]:
    """Return `[start, end)` of the sorted rows that share a length; dynamic programming.

    Args:
        ends: i64[D], rows up to and including each different length.
        longest: i64[D], those lengths.
        max_tokens: Of one pass.
        overhead_tokens: Of one pass.
    """
    starts = np.concatenate([[0], ends[:-1]])
    cost = np.zeros(len(ends) + 1)
    choice = np.zeros(len(ends), np.int64)
    for last in range(len(ends)):
        counts = ends[last] - starts[: last + 1]
        fitting = max(1, max_tokens // longest[last])
        total = cost[: last + 1] + counts * longest[last] + -(-counts // fitting) * overhead_tokens
        choice[last] = total.argmin()
        cost[last + 1] = total[choice[last]]
    cuts: list[tuple[int, int]] = []
    last = len(ends) - 1
    while last >= 0:
        cuts.append((int(starts[choice[last]]), int(ends[last])))
        last = int(choice[last]) - 1
    return cuts[::-1]


def _trees_of(
    rows: TrainRows, indices: np.ndarray, *, max_tokens: int, attention_tokens: float
) -> list[ModelPass] | None:
    """Cut rows into trees that together cost least, each a pass; None: no tree is worth it.

    In alphabetical order a row shares most with the one before it, so every stretch of rows is a
    tree: all of its first row, and of each further one what it has of its own.
    """
    bounds = np.searchsorted(rows.loss.positions, rows.offsets)

    def content(row: int) -> tuple[bytes, bytes, bytes]:
        span = slice(bounds[row], bounds[row + 1])
        # Big-endian bytes compare as the tokens do; what is equal in all of this is the same row.
        tokens = rows.tokens[rows.offsets[row] : rows.offsets[row + 1]].astype(">u4")
        logprobs, advantages = rows.loss.sampler_logprobs[span], rows.loss.advantages[span]
        return tokens.tobytes(), logprobs.tobytes(), advantages.tobytes()

    ordered = np.array(sorted(indices.tolist(), key=content), np.int64)
    lengths = rows.lengths[ordered]
    shared = np.zeros(len(ordered), np.int64)
    for at in range(1, len(ordered)):
        count = min(lengths[at - 1], lengths[at])
        before, row = (rows.offsets[ordered[at - 1]], rows.offsets[ordered[at]])
        differs = rows.tokens[before : before + count] != rows.tokens[row : row + count]
        shared[at] = differs.argmax() if differs.any() else count
    cuts = _cheapest_trees(
        lengths,
        shared,
        most=min(max_tokens, _TREE_TOKENS),
        attention_tokens=attention_tokens,
    )
    if len(cuts) == len(ordered):
        return None
    trees: list[ModelPass] = []
    for start, end in cuts:
        counts = shared[start:end].copy()
        counts[0] = 0
        length = int((lengths[start:end] - counts).sum())
        trees.append(ModelPass(rows=ordered[start:end], length=length, shared_counts=counts))
    return trees


def _cheapest_trees(
    lengths: np.ndarray, shared: np.ndarray, *, most: int, attention_tokens: float
) -> list[tuple[int, int]]:
    """Return `[start, end)` of the ordered rows of each tree; dynamic programming.

    Args:
        lengths: i64[N], tokens of each row.
        shared: i64[N], first tokens that each has in common with the one before it.
        most: Tokens of a tree of several rows.
        attention_tokens: See `passes_of`.
    """
    # Tokens of the tree of rows [start, end) are own[end] - own[start] + shared[start].
    own = np.concatenate([[0], np.cumsum(lengths - shared)])
    cost = np.zeros(len(lengths) + 1)
    choice = np.zeros(len(lengths), np.int64)
    first = 0
    for end in range(1, len(lengths) + 1):
        if not shared[end - 1]:
            first = end - 1
        while first < end - 1 and own[end] - own[first] + shared[first] > most:
            first += 1
        sizes = own[end] - own[first:end] + shared[first:end]
        # A token of a tree attends to all of it under a mask; of a row alone, to half on average.
        total = cost[first:end] + sizes * (1 + sizes / attention_tokens)
        total[-1] -= sizes[-1] ** 2 / attention_tokens / 2
        best = int(total.argmin())
        choice[end - 1], cost[end] = first + best, total[best]
    cuts: list[tuple[int, int]] = []
    end = len(lengths)
    while end:
        cuts.append((int(choice[end - 1]), end))
        end = cuts[-1][0]
    return cuts[::-1]
