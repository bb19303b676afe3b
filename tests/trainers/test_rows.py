"""The rows of a batch."""

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.rows import TrainRows


def test_parts_are_joined_in_order(make_rows, to_part):
    rows = make_rows(5)
    joined = TrainRows.from_parts([to_part(rows[:2]), to_part(rows[2:], index=1)])
    whole = TrainRows.from_parts([to_part(rows)])
    assert joined.row_count == 5
    np.testing.assert_array_equal(joined.offsets, whole.offsets)
    np.testing.assert_array_equal(joined.tokens, np.concatenate([row["tokens"] for row in rows]))
    np.testing.assert_array_equal(joined.loss.rows, whole.loss.rows)


def test_loss_tokens_are_those_under_the_mask(make_rows, to_part):
    rows = make_rows(4)
    loss = TrainRows.from_parts([to_part(rows)]).loss
    masks = [row["loss_mask"] for row in rows]
    np.testing.assert_array_equal(loss.positions, np.flatnonzero(np.concatenate(masks)))
    np.testing.assert_array_equal(loss.rows, np.repeat(range(4), [mask.sum() for mask in masks]))
    assert (loss.weights == 1).all()


def test_greedy_rows_keep_their_logits(make_rows, to_part):
    rows = make_rows(2)
    rows[0]["temperature"], rows[1]["temperature"] = 0.0, 0.5
    loss = TrainRows.from_parts([to_part(rows)]).loss
    assert set(loss.temperatures[loss.rows == 0]) == {1.0}
    assert set(loss.temperatures[loss.rows == 1]) == {0.5}


def test_rows_without_advantage_move_nothing(make_rows, to_part):
    rows = make_rows(3)
    rows[1]["advantages"] = np.zeros_like(rows[1]["advantages"])
    rows[2]["advantages"] = np.where(rows[2]["loss_mask"], 1, 0).astype(np.float32)
    is_trained = TrainRows.from_parts([to_part(rows)]).row_is_trained
    assert is_trained.tolist() == [True, False, True]


def test_missing_column_is_named(make_rows, to_part):
    with pytest.raises(AstraflowError, match="column advantages") as caught:
        TrainRows.from_parts([to_part(make_rows(1), without=["advantages"])])
    assert caught.value.reason is Reason.INVALID_FIELD


def test_loss_on_the_first_token_of_a_row_is_refused(make_rows, to_part):
    rows = make_rows(2)
    rows[1]["loss_mask"][0] = True
    with pytest.raises(AstraflowError, match="first token of a row"):
        TrainRows.from_parts([to_part(rows)])
