"""Rewards within a row: which turn each is of, and what a turn earned from there on."""

from zlib import crc32

import numpy as np

from astraflow.config.recipe import Advantages
from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import TrainRows


def turn_advantages(rows: TrainRows, settings: Advantages, *, peers: Peers = ALONE) -> np.ndarray:
    """Return f32[K], what is added to the advantage of each loss token for the rewards of turns.

    A = R - mean R, with R the discounted rewards of a token's turn and those after it in its row,
    and the mean over the same turn of the rows that it is compared with: those of its group and
    agent that have such a turn. It is the group-relative advantage of GRPO, turn by turn, as in
    arXiv 2505.11821.

    Args:
        rows: This rank's share of a batch; 0 for a batch without such rewards.
        settings: The discount per turn; and for each agent whether the mean is taken off.
        peers: The ranks that have the others; all make the same calls.

    Example: two rows of a group, whose turns earned 1, 0 and 0, 1, without a discount: R are 1, 0
        and 1, 1; their means 1 and 0.5; A of the turns 0, -0.5 and 0, 0.5.
    """
    rewards = rows.loss.rewards
    if not peers.all_reduce_max(0 if rewards is None else int(rewards.any())):
        return np.zeros(len(rows.loss), np.float32)
    # Turns are stretches of loss tokens without another token between them.
    positions, row_of = rows.loss.positions, rows.loss.rows
    starts = np.ones(len(positions), np.bool_)
    starts[1:] = (np.diff(positions) > 1) | (np.diff(row_of) > 0)
    turn_of, turn_rows = np.cumsum(starts) - 1, row_of[starts]  # i64[K], i64[M]
    given = np.zeros(len(positions)) if rewards is None else rewards
    returns = np.bincount(turn_of, weights=given, minlength=len(turn_rows))
    for turn in range(len(returns) - 2, -1, -1):
        if turn_rows[turn] == turn_rows[turn + 1]:
            returns[turn] += settings.turn_discount * returns[turn + 1]
    numbers = np.arange(len(turn_rows)) - np.searchsorted(turn_rows, turn_rows)
    keys = np.stack([rows.compared_with[turn_rows], numbers.astype(np.uint64)], axis=1)
    all_keys, all_returns = peers.all_gather(keys), peers.all_gather(returns)
    _, places = np.unique(np.concatenate([keys, all_keys]), axis=0, return_inverse=True)
    own, place = np.split(places.ravel(), [len(keys)])
    means = np.bincount(place, weights=all_returns) / np.bincount(place)
    earned = returns - np.where(_is_compared(rows, settings)[turn_rows], means[own], 0)
    return earned[turn_of].astype(np.float32)


def _is_compared(rows: TrainRows, settings: Advantages) -> np.ndarray:
    """Return bool[N], whether the baseline of a row's agent is some mean."""
    baselines = {crc32(name.encode()): each.baseline for name, each in settings.agents.items()}
    agents: list[int] = (rows.compared_with & np.uint64(0xFFFFFFFF)).tolist()
    return np.array([baselines.get(each, settings.baseline) != "none" for each in agents], np.bool_)
