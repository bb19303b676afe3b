"""Which rows go through the model together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from astraflow.trainers.likelihood import PassTokens
from astraflow.trainers.passes import evened, passes_of, plan_passes
from astraflow.trainers.rows import TrainRows

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 2000), overhead=st.integers(0, 500))
def test_every_row_is_in_one_pass_that_it_fits(lengths, max_tokens, overhead):
    array = np.array(lengths)
    plan = plan_passes(array, max_tokens=max_tokens, overhead_tokens=overhead)
    assert sorted(np.concatenate([one.rows for one in plan])) == list(range(len(lengths)))
    for one in plan:
        assert one.length == array[one.rows].max()
        assert one.padded_token_count <= max_tokens or len(one.rows) == 1


@given(lengths=LENGTHS, overhead=st.integers(0, 500))
def test_plan_costs_no_more_than_one_pass_or_a_pass_per_length(lengths, overhead):
    array = np.array(lengths)
    plan = plan_passes(array, max_tokens=10**9, overhead_tokens=overhead)
    cost = sum(one.padded_token_count + overhead for one in plan)
    assert cost <= array.max() * len(array) + overhead
    assert cost <= array.sum() + len(set(lengths)) * overhead


def test_rows_of_like_length_share_a_pass():
    lengths = np.array([10, 2000, 12, 1990, 11])
    plan = plan_passes(lengths, max_tokens=10_000)
    assert [one.rows.tolist() for one in plan] == [[0, 4, 2], [3, 1]]


def test_equal_rows_are_cut_evenly():
    plan = plan_passes(np.full(10, 100), max_tokens=450)
    assert [len(one.rows) for one in plan] == [4, 3, 3]


def test_nothing_needs_no_pass():
    assert plan_passes(np.array([], np.int64), max_tokens=10) == ()


def test_a_rank_with_fewer_passes_computes_nothing_first():
    plan = plan_passes(np.array([5, 40]), max_tokens=50, overhead_tokens=1)
    assert len(plan) == 2
    longer = evened(plan, 4)
    assert longer[2:] == plan
    assert [len(one.rows) for one in longer[:2]] == [0, 0]
    assert evened(plan, 2) == plan


def rows_of(make_row, to_part, sentences):
    rng = np.random.default_rng(0)
    rows = [make_row(rng, prompt=1, length=len(each)) for each in sentences]
    for row, tokens in zip(rows, sentences, strict=True):
        row["tokens"] = np.array(tokens, np.int32)
    return TrainRows.from_parts([to_part(rows)])


def planned(rows, **knobs):
    return passes_of(
        rows,
        np.ones(rows.row_count, np.bool_),
        **{"max_tokens": 1000, "attention_tokens": 100} | knobs,
    )


def test_rows_that_begin_alike_are_a_tree(make_row, to_part):
    rows = rows_of(make_row, to_part, [[5, 6, 7, 8], [9, 9, 9], [5, 6, 7, 4, 4], [5, 6, 3]])
    [one] = planned(rows)
    assert (one.rows.tolist(), one.shared_counts.tolist()) == ([1, 3, 2, 0], [0, 0, 2, 3])
    assert (one.sequence_count, one.length, one.padded_token_count) == (2, 7, 14)
    tokens = PassTokens.of(rows, one)
    assert tokens.tokens.tolist() == [[9, 9, 9, 9, 9, 9, 9], [5, 6, 3, 7, 4, 4, 8]]
    assert tokens.positions.tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 1, 2, 2, 3, 4, 3]]
    assert tokens.ends.tolist() == [[3, 3, 3, 4, 5, 6, 7], [7, 7, 3, 7, 6, 6, 7]]
    # Row 1; row 3 is 5 6 3; row 2 is 5 6 7 4 4; row 0 is 5 6 7 8, predicted from 5, 6 and 7.
    assert tokens.chosen.tolist() == [0, 1, 7, 8, 7, 8, 10, 11, 7, 8, 10]
    assert tokens.targets.tolist() == [9, 9, 6, 3, 6, 7, 4, 4, 6, 7, 8]


def test_equal_rows_are_computed_once(make_row, to_part):
    rows = rows_of(make_row, to_part, [[5, 6, 7]] * 3)
    [one] = planned(rows)
    assert one.padded_token_count == 3
    assert PassTokens.of(rows, one).chosen.tolist() == [0, 1] * 3


def test_rows_that_share_little_go_alone(make_row, to_part):
    """A tree is as long as all its rows, and attention is quadratic."""
    rng = np.random.default_rng(0)
    sentences = [[5, *rng.integers(3, 14, 200)] for _ in range(6)]
    rows = rows_of(make_row, to_part, sentences)
    assert not any(one.has_branches for one in planned(rows, max_tokens=10_000))
    plain = planned(rows, max_tokens=10_000, attention_tokens=None)
    assert [one.rows.tolist() for one in plain] == [
        one.rows.tolist() for one in planned(rows, max_tokens=10_000)
    ]


SENTENCES = st.lists(st.lists(st.integers(3, 5), min_size=2, max_size=9), min_size=1, max_size=12)


@given(sentences=SENTENCES, max_tokens=st.integers(4, 60), attention=st.floats(1, 1000))
def test_every_row_has_its_own_tokens_in_its_tree(
    sentences, max_tokens, attention, make_row, to_part
):
    rows = rows_of(make_row, to_part, sentences)
    plan = planned(rows, max_tokens=max_tokens, attention_tokens=attention)
    assert sorted(np.concatenate([one.rows for one in plan])) == list(range(len(sentences)))
    seen = []
    for one in plan:
        assert one.padded_token_count <= max_tokens or len(one.rows) == 1
        tokens = PassTokens.of(rows, one)
        flat, width = tokens.tokens.ravel(), one.length
        depths = (
            tokens.positions
            if one.has_branches
            else np.tile(np.arange(width), (one.sequence_count, 1))
        )
        ends = tokens.ends if one.has_branches else np.full_like(depths, width)
        for at, target, index in zip(
            tokens.chosen, tokens.targets, tokens.loss_indices, strict=True
        ):
            tree, slot = divmod(int(at), width)
            path = [j for j in range(slot + 1) if slot < ends[tree, j]]
            assert [int(depths[tree, j]) for j in path] == list(range(len(path)))
            sentence = sentences[rows.loss.rows[index]]
            assert [*(flat[tree * width + j] for j in path), target] == sentence[: len(path) + 1]
            seen.append(index)
    assert sorted(seen) == list(range(len(rows.loss)))


def test_the_order_of_arrival_does_not_change_a_tree(make_row, to_part):
    sentences = [[5, 6, 7, 8], [5, 6, 3], [5, 6, 7, 8, 9], [4, 4], [4, 5]]
    plans = []
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        rows = rows_of(make_row, to_part, [sentences[each] for each in order])
        plans.append(
            [
                (np.array(order)[one.rows].tolist(), one.length)
                for one in planned(rows, max_tokens=8)
            ]
        )
    assert plans[0] == plans[1]
