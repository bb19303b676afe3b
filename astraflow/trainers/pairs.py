"""Losses of pairs: rows that are compared with others of their group, and what follows for each.

A pair's loss is a function of two numbers, one of each row: `beta` times the log-ratio of its
answer to the reference (DPO, arXiv 2305.18290, eq. 7), or the score of a reward model
(Bradley-Terry; InstructGPT, arXiv 2203.02155, eq. 1). So the numbers of all rows come first, and
the gradient is a sum over rows, each times the slope of the loss there: rows of one pair may lie in
different passes, and on different ranks.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from astraflow.config.losses import Pairs
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import LossTokens, TrainRows

_NO_GROUP = np.uint64(0xFFFFFFFF)


def compare(
    values: np.ndarray, rows: TrainRows, settings: Pairs, peers: Peers = ALONE
) -> tuple[np.ndarray, Mapping[str, float]] | None:
    """Compare rows with those of other rewards of their groups; None: there are no two such.

    -log sigmoid(z) of each pair, z the lead of the preferred row less the margin; with label
    smoothing e it is -(1 - e) log sigmoid(z) - e log sigmoid(-z).

    Args:
        values: f64[N], the number of each row.
        rows: This rank's.
        settings: Of the recipe.
        peers: The ranks that have the others.

    Returns:
        f64[N], slopes of the loss, a mean over the pairs of all ranks, at each row's number; and
        numbers for the log, of all pairs.

    Raises:
        AstraflowError: INVALID_FIELD when groups are not known.

    Example: two rows of numbers 1.0 and 0.0, the first of the higher reward: z is 1, the loss .313
        and the slopes -.269 and .269.
    """
    # Nothing is learned of a row without a loss token, as of what a filter masks.
    has_loss = np.isin(np.arange(rows.row_count), rows.loss.rows)
    rewards = np.where(has_loss, rows.rewards, np.nan).astype(np.float64)
    groups = rows.compared_with
    others = [peers.all_gather(each) for each in (values, rewards, groups)]
    gap = np.nan_to_num(rewards[:, None] - others[1])  # [N, M], of each own row to all
    is_pair = (groups[:, None] == others[2]) & (gap != 0)
    if (others[2] >> np.uint64(32) == _NO_GROUP).any():
        raise AstraflowError(
            Reason.INVALID_FIELD, "a batch without group_index has no rows that can be compared"
        )
    count = peers.all_reduce_sum(int((is_pair & (gap > 0)).sum()))
    if not count:
        return None
    side = np.sign(gap)
    lead = side * (values[:, None] - others[0])
    z = lead - settings.margin * np.abs(gap)
    smoothing = settings.label_smoothing
    loss = (1 - smoothing) * np.logaddexp(0, -z) + smoothing * np.logaddexp(0, z)
    slope = smoothing - 1 / (1 + np.exp(np.clip(z, -500, 500)))
    slopes = np.where(is_pair, side * slope, 0.0).sum(1) / count
    # Each pair once, where its preferred row lies.
    mine = is_pair & (gap > 0)

    def mean(each: np.ndarray) -> float:
        return peers.all_reduce_sum(float(each[mine].sum())) / count

    return slopes, {
        "train/loss": mean(loss),
        "pairs/accuracy": mean(lead > 0),
        "pairs/lead": mean(lead),
        "pairs/chosen": mean(np.broadcast_to(values[:, None], gap.shape)),
        "pairs/rejected": mean(np.broadcast_to(others[0], gap.shape)),
    }


def log_ratios(
    tokens: LossTokens, logprobs: np.ndarray, reference: np.ndarray, row_count: int
) -> np.ndarray:
    """Return f64[N], log-probability of each row's loss tokens less that of the reference."""
    gap = (logprobs.astype(np.float64) - reference) * tokens.weights
    return np.bincount(tokens.rows, weights=gap, minlength=row_count)


def scored_at_the_end(rows: TrainRows) -> TrainRows:
    """Return rows whose one loss token comes after their last: there the model says a score.

    Each has a token more, 0, which nothing that counts attends to. Rows without a loss stay so.
    """
    kept = np.unique(rows.loss.rows)
    ends = rows.offsets[1:] + np.arange(rows.row_count)
    return replace(
        rows,
        tokens=np.insert(rows.tokens, rows.offsets[1:], 0),
        offsets=rows.offsets + np.arange(rows.row_count + 1),
        loss=LossTokens.plain(ends[kept], kept),
        routed_experts=None,
    )
