"""The rows of a batch."""

from dataclasses import replace

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED
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


def test_parts_without_loss_weights_have_1(make_rows, to_part):
    rows = make_rows(2)
    rows[1]["loss_weights"] = np.full(len(rows[1]["tokens"]), 0.25, np.float32)
    loss = TrainRows.from_parts([to_part(rows[:1]), to_part(rows[1:], index=1)]).loss
    assert set(loss.weights[loss.rows == 0]) == {1.0}
    assert set(loss.weights[loss.rows == 1]) == {0.25}


def test_routes_of_another_model_count_as_not_told(make_rows, to_part):
    rows = make_rows(2)
    for row, layers in zip(rows, (2, 3), strict=True):
        row["routed_experts"] = np.ones((len(row["tokens"]), layers, 1), np.uint16)
    joined = TrainRows.from_parts([to_part(rows[:1]), to_part(rows[1:], index=1)])
    assert joined.routed_experts.shape == (len(joined.tokens), 2, 1)
    assert (joined.routed_experts[joined.offsets[1] :] == UNROUTED).all()


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


@pytest.mark.parametrize("without_rows", [False, True])
def test_a_rank_may_get_nothing_of_a_batch(to_part, make_rows, without_rows):
    part = to_part(make_rows(1))
    columns = {name: replace(each, values=each.values[:0]) for name, each in part.columns.items()}
    empty = replace(
        part,
        row_offsets=part.row_offsets[:1],
        trajectory_ids=(),
        rollout_ids=(),
        columns=columns,
    )
    rows = TrainRows.from_parts([empty] if without_rows else [])
    assert (rows.row_count, len(rows.loss), len(rows.tokens)) == (0, 0, 0)
    rows.require_vocabulary(1)
    assert not rows.row_is_trained.any()


@pytest.mark.parametrize("name", ["advantages", "logprobs"])
def test_numbers_that_are_none_are_named_with_their_row(to_part, make_rows, name):
    rows = make_rows(3)
    rows[1][name][-1] = np.inf
    with pytest.raises(AstraflowError, match=r"b1: \w+ has -?inf in row 1, 1 of \d+") as caught:
        TrainRows.from_parts([to_part(rows)])
    assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.parametrize("token", [-1, 14])
def test_tokens_of_another_tokenizer_are_named(to_part, make_rows, token):
    rows = make_rows(2)
    rows[0]["tokens"][0] = token
    with pytest.raises(AstraflowError, match=rf"token {token} .* vocabulary of 14"):
        TrainRows.from_parts([to_part(rows)]).require_vocabulary(14)
