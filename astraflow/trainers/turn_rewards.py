"""Rewards within a row: which turn each is of, and what a turn earned from there on."""

from dataclasses import dataclass

import numpy as np

from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import TrainRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The turns of some rows: stretches of loss tokens without another token between them.

    Attributes:
        of_token: i64[K], which turn each loss token is of.
        rows: i64[M], in which row each turn lies.
        numbers: i64[M], of each turn in its row, from 0.
    """

    of_token: np.ndarray
    rows: np.ndarray
    numbers: np.ndarray

    @classmethod
    def of(cls, rows: TrainRows) -> "Turns":
        """Find the turns of a batch."""
        positions, row = rows.loss.positions, rows.loss.rows
        starts = np.ones(len(positions), np.bool_)
        starts[1:] = (np.diff(positions) > 1) | (np.diff(row) > 0)
        rows_of = row[starts]
        first = np.searchsorted(rows_of, rows_of)
        return cls(
            of_token=np.cumsum(starts) - 1, rows=rows_of, numbers=np.arange(len(rows_of)) - first
        )

    def returns(self, rewards: np.ndarray, discount: float) -> np.ndarray:
        """Return f64[M], what each turn and those after it in its row earned.

        Args:
            rewards: f[K], given at loss tokens.
            discount: Per turn.
        """
        found = np.bincount(self.of_token, weights=rewards, minlength=len(self.rows))
        for turn in range(len(found) - 2, -1, -1):
            if self.rows[turn] == self.rows[turn + 1]:
                found[turn] += discount * found[turn + 1]
        return found


def turn_advantages(
    rows: TrainRows, *, discount: float, is_compared: bool, peers: Peers = ALONE
) -> np.ndarray:
    """Return f32[K], what is added to the advantage of each loss token for the rewards of turns.

    A = R - mean R, with R the discounted rewards of a token's turn and those after it in its row,
    and the mean over the same turn of the rows that it is compared with: those of its group and
    agent that have such a turn. It is the group-relative advantage of GRPO, turn by turn, as in
    arXiv 2505.11821.

    Args:
        rows: This rank's share of a batch; 0 for a batch without such rewards.
        discount: Per turn.
        is_compared: Whether the mean is taken off.
        peers: The ranks that have the others; all make the same calls.

    Example: two rows of a group, whose turns earned 1, 0 and 0, 1, without a discount: R are 1, 0
        and 1, 1; their means 1 and 0.5; A of the turns 0, -0.5 and 0, 0.5.
    """
    rewards = rows.loss.rewards
    if not peers.all_reduce_max(0 if rewards is None else int(rewards.any())):
        return np.zeros(len(rows.loss), np.float32)
    turns = Turns.of(rows)
    returns = turns.returns(np.zeros(len(rows.loss)) if rewards is None else rewards, discount)
    if is_compared:
        keys = np.stack([rows.compared_with[turns.rows], turns.numbers.astype(np.uint64)], axis=1)
        all_keys, all_returns = peers.all_gather(keys), peers.all_gather(returns)
        same, place = np.unique(all_keys, axis=0, return_inverse=True)
        sums = np.bincount(place.ravel(), weights=all_returns, minlength=len(same))
        means = sums / np.bincount(place.ravel(), minlength=len(same))
        at = {(int(key[0]), int(key[1])): index for index, key in enumerate(same)}
        returns = returns - means[[at[int(key[0]), int(key[1])] for key in keys]]
    return returns[turns.of_token].astype(np.float32)
