from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.core.packing import (
    FINISH_NUMBERS,
    OUTCOME_NUMBERS,
    Share,
    laid_out,
    share_out,
    split,
)
from astraflow.core.rollouts import (
    ROUTED_EXPERTS,
    UNROUTED,
    Column,
    ColumnAxis,
    FinishReason,
    Outcome,
    VersionSpan,
)
from astraflow.core.samples import Row


@pytest.fixture
def rows(trajectory, rollout_of):
    class Task:
        task_id, group_id, attempt = "t", "g", 0

    rollout = rollout_of(Task, 3, versions={"solver": (4, 4, 5)})
    return [
        Row(
            trajectory=trajectory("a", versions=(4, 4, 5), length=5),
            rollout=rollout,
            reward=1.0,
            min_version=4,
            max_version=5,
            advantage=0.5,
        ),
        Row(
            trajectory=trajectory("b", versions=(5,), length=2),
            rollout=rollout,
            reward=0.0,
            min_version=5,
            max_version=5,
            advantage=-0.5,
        ),
    ]


def shared(rows, **more):
    return Share("b", rows, **({"max_tokens": 0, "group_indexes": {"g": 7}} | more))


def packed(rows, *, policy_ids=("solver",), **more):
    return [laid_out(part, policy_ids) for part in shared(rows, **more)]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 5))
def test_shares_hold_every_row_once_and_differ_by_one_row_at_most(lengths, ranks):
    shares = share_out(lengths, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 120))
def test_runs_cover_all_rows_in_order_within_the_bound(lengths, bound):
    runs = split(lengths, bound)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))
    for run in runs:
        assert sum(lengths[run]) <= bound or run.stop - run.start == 1


def test_loss_weights_of_rows_are_times_those_of_the_workflow(rows):
    (part,) = packed(rows, loss_weights=[0.5, 1.0])
    assert part.values("loss_weights").tolist() == [0.5] * 5 + [1.0] * 2
    for row in rows:
        own = np.full(len(row.trajectory.tokens), 3, np.float32)
        column = Column(axis=ColumnAxis.TOKEN, values=own)
        row.trajectory = replace(row.trajectory, columns={"loss_weights": column})
    (part,) = packed(rows, loss_weights=[0.5, 1.0])
    assert part.values("loss_weights").tolist() == [1.5] * 5 + [3.0] * 2


def test_rows_lie_end_to_end_with_their_columns(rows):
    (part,) = packed(rows)
    assert part.row_offsets.tolist() == [0, 5, 7]
    assert part.values("tokens").tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert part.values("loss_mask").tolist() == [False, False, True, True, True, False, True]
    assert part.values("versions").tolist() == [-1, -1, 4, 4, 5, -1, 5]
    assert part.values("advantages").tolist() == [0, 0, 0.5, 0.5, 0.5, 0, -0.5]
    assert part.values("group_index").tolist() == [7, 7]
    assert part.values("sample_index").tolist() == [3, 3]
    assert part.values("rewards").tolist() == [1, 0]
    assert part.values("min_versions").tolist() == [4, 5]
    assert "policy_index" not in part.columns


def test_rows_say_which_are_of_one_agent(rows):
    """Whatever their rewards are: all agents of a rollout may have the same."""
    for row, agent in zip(rows, ("", "verifier"), strict=True):
        row.trajectory = replace(row.trajectory, agent=agent)
    (part,) = packed(rows)
    assert part.values("agent_crc").tolist() == [0, 0xFB914A48]


def test_columns_have_the_contracts_types(rows):
    (part,) = packed(rows)
    expected = {
        "tokens": "int32",
        "loss_mask": "bool",
        "logprobs": "float32",
        "versions": "int64",
        "advantages": "float32",
        "group_index": "int32",
        "sample_index": "int32",
        "agent_crc": "uint32",
        "rewards": "float32",
        "outcomes": "int32",
        "finish_reasons": "int32",
        "min_versions": "int64",
        "max_versions": "int64",
        "temperature": "float32",
        "group_reward_mean": "float32",
        "group_reward_std": "float32",
        "use_count": "int32",
    }
    assert {name: str(c.values.dtype) for name, c in part.columns.items()} == expected


def test_long_row_is_a_part_of_its_own(rows):
    parts = packed(rows, max_tokens=3)
    assert [part.token_count for part in parts] == [5, 2]
    assert [part.index for part in parts] == [0, 1]


def test_tokens_that_another_policy_sampled_carry_no_loss(rows, trajectory):
    row = rows[0]
    spans = (
        VersionSpan(version=4, length=1),
        VersionSpan(version=9, length=2, policy_id="verifier"),
    )
    mixed = trajectory("c", versions=(4, 9, 9), length=4)
    object.__setattr__(mixed, "version_spans", spans)
    row.trajectory = mixed
    (part,) = packed([row], policy_ids=("solver", "verifier"))
    assert part.values("policy_index").tolist() == [-1, 0, 1, 1]
    assert part.values("loss_mask").tolist() == [False, True, False, False]
    assert part.values("advantages").tolist() == [0, 0.5, 0, 0]


def test_columns_of_workflows_travel_when_every_row_has_them(rows):
    def column(length):
        return Column(axis=ColumnAxis.TOKEN, values=np.ones(length, np.float32))

    for row in rows:
        columns = {"judged": column(len(row.trajectory.tokens))}
        object.__setattr__(row.trajectory, "columns", columns)
    (part,) = packed(rows)
    assert len(part.values("judged")) == 7
    object.__setattr__(rows[1].trajectory, "columns", {})
    (part,) = packed(rows)
    assert "judged" not in part.columns


def tell_routes(row, routes):
    column = Column(axis=ColumnAxis.TOKEN, values=routes)
    object.__setattr__(row.trajectory, "columns", {ROUTED_EXPERTS: column})


def test_rows_that_do_not_tell_their_experts_take_none_from_those_that_do(rows):
    tell_routes(rows[1], np.array([[[3, 1]], [[2, 0]]], np.uint16))
    (part,) = packed(rows)
    routes = part.values(ROUTED_EXPERTS)
    assert (routes[:5] == UNROUTED).all()
    assert routes[5:].tolist() == [[[3, 1]], [[2, 0]]]


def test_rows_whose_turns_have_no_rewards_get_none_from_those_that_do(rows):
    column = Column(axis=ColumnAxis.TOKEN, values=np.array([0, 0, 1, 0, 0.5], np.float32))
    assert "token_rewards" not in packed(rows)[0].columns
    rows[0].trajectory = replace(rows[0].trajectory, columns={"token_rewards": column})
    (part,) = packed(rows)
    count = rows[0].trajectory.token_count
    assert part.values("token_rewards")[:count].tolist() == [0, 0, 1, 0, 0.5]
    assert not part.values("token_rewards")[count:].any()


def test_rows_without_weights_of_their_own_take_none_from_those_that_have_them(rows):
    own = np.array([0, 0, 1, 0, 0.5], np.float32)
    column = Column(axis=ColumnAxis.TOKEN, values=own)
    rows[0].trajectory = replace(rows[0].trajectory, columns={"loss_weights": column})
    for order in (rows, rows[::-1]):
        (part,) = packed(order, loss_weights=[2.0, 2.0])
        found = np.split(part.values("loss_weights"), part.row_offsets[1:-1])
        found = found if order is rows else found[::-1]
        assert [each.tolist() for each in found] == [[0, 0, 2, 0, 1], [2, 2]]
    (part,) = packed(rows)
    assert part.values("loss_weights").tolist() == [*own.tolist(), 1, 1]


@pytest.mark.parametrize(("experts", "counts"), [((48, 8), [7]), ((4000, 4000), [5, 2])])
def test_wide_columns_make_more_parts(rows, experts, counts):
    nowhere = np.zeros((), np.uint16)
    for row in rows:
        tell_routes(row, np.broadcast_to(nowhere, (len(row.trajectory.tokens), *experts)))
    assert [part.token_count for part in shared(rows)] == counts


def test_no_rows_make_no_part():
    assert list(packed([])) == []


def test_numbers_are_those_of_the_contract():
    rollout_pb2 = pytest.importorskip("astraflow_proto.rollout.v1.rollout_pb2")
    trajectory_pb2 = pytest.importorskip("astraflow_proto.rollout.v1.trajectory_pb2")
    for outcome in Outcome:
        assert OUTCOME_NUMBERS[outcome] == rollout_pb2.Outcome.Value(f"OUTCOME_{outcome.name}")
    for finish in FinishReason:
        number = trajectory_pb2.FinishReason.Value(f"FINISH_REASON_{finish.name}")
        assert FINISH_NUMBERS[finish] == number


def test_a_part_is_of_the_rows_as_they_were_when_the_batch_was_drawn(rows):
    share = shared(rows)
    rows[0].use_count = 1
    (part,) = share
    assert part.values("use_count").tolist() == [0, 0]


def test_a_share_tells_its_rollouts_without_making_a_part(rows):
    share = shared(rows, max_tokens=3)
    assert share.rollout_ids == [name for part in share for name in part.rollout_ids]
    assert len(share) == 2
