"""What tokens count, and what their advantages are compared with."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.config.recipe import Loss
from astraflow.trainers.losses import prepared
from tests.trainers.losses.test_algorithms import loss_tokens, some_rows


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_what_counts():
    tokens = loss_tokens(some_rows())
    tokens.weights[:5] = 0
    white = prepared(tokens, Loss(whiten=True))
    counted = white.advantages[white.weights != 0]
    assert counted.mean() == pytest.approx(0, abs=1e-9)
    assert counted.std() == pytest.approx(1, abs=1e-4)
    assert np.corrcoef(white.advantages, tokens.advantages)[0, 1] == pytest.approx(1)


def test_rows_share_out_one_among_their_tokens():
    tokens = loss_tokens(some_rows())
    even = prepared(replace(tokens, weights=np.ones(len(tokens))), Loss(mean="rows"))
    assert np.bincount(even.rows, even.weights) == pytest.approx(np.ones(12))


def test_a_batch_without_tokens_stays_as_it_is():
    empty = loss_tokens(some_rows()).where(np.zeros(0, np.int64))
    assert not len(prepared(empty, Loss(whiten=True, mean="rows")))
