"""Rewards of turns: what each turn earned, compared with the same turn of its group."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest

from astraflow.config.recipe import Advantages, CriticConfig, Optimizer, TrainerConfig
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.trainers.critic import CriticLearner, valued
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.turn_rewards import turn_advantages

# Two tokens are seen, two sampled, one seen, one sampled.
MASK = [False, False, True, True, False, True]
# By row: the rewards of its two turns. The first three are one group, the last is alone.
REWARDS = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (3.0, 5.0)]


@pytest.fixture
def part(make_row, to_part):
    rng = np.random.default_rng(0)
    rows = []
    for _ in REWARDS:
        row = make_row(rng, length=6, advantage=0.0)
        row["loss_mask"] = np.array(MASK)
        rows.append(row)
    made = to_part(rows)
    given = np.zeros((4, 6), np.float32)
    for row, (first, second) in enumerate(REWARDS):
        # The environment pays with its answer, one token later; the scorer at the end.
        given[row, 4], given[row, 5] = first, second
    columns = {
        "token_rewards": Column(axis=ColumnAxis.TOKEN, values=given.ravel()),
        "group_index": Column(axis=ColumnAxis.ROW, values=np.array([0, 0, 0, 1], np.int32)),
    }
    return replace(made, columns={**made.columns, **columns})


def by_turn(found):
    """Return the advantage of each turn of each row; tokens of a turn have the same."""
    rows = np.reshape(found, (4, 3))
    assert (rows[:, 0] == rows[:, 1]).all()
    return rows[:, 1:].tolist()


def test_a_turn_is_compared_with_the_same_turn_of_its_group(part):
    rows = TrainRows.from_parts([part])
    found = by_turn(turn_advantages(rows, Advantages()))
    # Returns of the group: (1, 0), (1, 1), (0, 0); means 2/3 and 1/3.
    np.testing.assert_allclose(
        found, [[1 / 3, -1 / 3], [1 / 3, 2 / 3], [-2 / 3, -1 / 3], [0, 0]], atol=1e-6
    )


def test_turns_are_discounted_and_need_not_be_compared(part):
    rows = TrainRows.from_parts([part])
    found = by_turn(turn_advantages(rows, Advantages(turn_discount=0.5, baseline="none")))
    assert found == [[1, 0], [0.5, 1], [0, 0], [5.5, 5]]


def test_agents_of_a_group_are_not_compared_with_each_other(part):
    agents = Column(axis=ColumnAxis.ROW, values=np.array([1, 1, 2, 1], np.uint32))
    rows = TrainRows.from_parts([replace(part, columns={**part.columns, "agent_crc": agents})])
    found = by_turn(turn_advantages(rows, Advantages(turn_discount=0.0)))
    assert found == [[0.5, -0.5], [-0.5, 0.5], [0, 0], [0, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_each_agent_is_compared_as_its_own_baseline_has_it(make_row, to_part, seed):
    rng = np.random.default_rng(seed)
    names = ["", "solver/2", "verifier"]
    baselines = dict(zip(names, rng.permutation(["group", "none", "leave_one_out"]), strict=True))
    settings = Advantages.model_validate(
        {
            "turn_discount": 0.5,
            "baseline": baselines[""],
            "agents": {name: {"baseline": baselines[name]} for name in names[1:]},
        }
    )
    rows, agents, paid = [], rng.choice(names, 12), []
    for _ in agents:
        row = make_row(rng, prompt=2, length=int(rng.integers(4, 20)))
        row["group"] = int(rng.integers(2))
        row["loss_mask"][2:] = rng.random(len(row["tokens"]) - 2) < 0.7
        paid.append(np.where(row["loss_mask"], rng.integers(3, size=len(row["tokens"])), 0))
        rows.append(row)
    part = to_part(rows)
    columns = {
        "token_rewards": Column(
            axis=ColumnAxis.TOKEN, values=np.concatenate(paid).astype(np.float32)
        ),
        "agent_crc": Column(
            axis=ColumnAxis.ROW, values=np.array([crc32(each.encode()) for each in agents], "u4")
        ),
    }
    found = turn_advantages(
        TrainRows.from_parts([replace(part, columns={**part.columns, **columns})]), settings
    )
    # Of each row, turn by turn: which tokens, and what it and those after it earned.
    turns = []
    for row, given in zip(rows, paid, strict=True):
        spans = []
        for at in np.flatnonzero(row["loss_mask"]).tolist():
            if spans and spans[-1][-1] == at - 1:
                spans[-1].append(at)
            else:
                spans.append([at])
        sums = [given[span].sum() for span in spans]
        earned = [
            sum(0.5 ** (later - turn) * sums[later] for later in range(turn, len(sums)))
            for turn in range(len(sums))
        ]
        turns.append((spans, earned))
    right = []
    for row, agent, (spans, earned) in zip(rows, agents, turns, strict=True):
        for turn, span in enumerate(spans):
            others = [
                its[turn]
                for other, name, (_, its) in zip(rows, agents, turns, strict=True)
                if (other["group"], name) == (row["group"], agent) and len(its) > turn
            ]
            mean = 0 if baselines[agent] == "none" else np.mean(others)
            right += [earned[turn] - mean] * len(span)
    np.testing.assert_allclose(found, right, atol=1e-6)


def test_rows_of_other_ranks_count_for_the_mean(part):
    class Two:
        """This rank, and one whose three rows of the group earned nothing."""

        def all_reduce_max(self, count):
            return count

        def all_gather(self, values):
            return np.concatenate([values, values[:2] if values.ndim == 2 else np.zeros(2)])

    rows = TrainRows.from_parts([part])
    found = by_turn(turn_advantages(rows, Advantages(turn_discount=0.0), peers=Two()))
    np.testing.assert_allclose(found[0], [1 - 1 / 4, -1 / 4], atol=1e-6)


def test_a_policy_learns_from_turns_alone(part, make_model):
    """All rows have the same reward, hence no advantage of the hub's."""
    rows = TrainRows.from_parts([part])
    settings = TrainerConfig(optimizer=Optimizer(learning_rate=1e-2))
    learner = PolicyLearner(make_model(), settings)
    everything = np.ones(4, np.bool_)
    before = learner.likelihoods(rows, everything).logprobs
    rows.loss.sampler_logprobs[:] = before
    for _ in range(5):
        metrics = learner.step(rows, divisor=len(rows.loss))
    assert metrics["train/trained_rows_frac"] == 0.75
    risen = (learner.likelihoods(rows, everything).logprobs - before).reshape(4, 3)
    assert risen[0, :2].mean() > 0 > risen[2, :2].mean()
    assert risen[1, 2] > 0 > risen[0, 2]


def test_a_critic_sees_them_and_nothing_is_added(part, make_model):
    rows = TrainRows.from_parts([part])
    rows.rewards[:] = 0
    config = CriticConfig(gamma=0.5)
    critic = CriticLearner(valued(make_model().module), config, max_tokens=64)
    found = critic.estimate(rows)
    _, advantages, returns = found
    assert returns.reshape(4, 3)[1].tolist() == [0.25, 0.5, 1.0]
    settings = TrainerConfig(critic=config, advantages=Advantages(turn_discount=0.5))
    learner = PolicyLearner(make_model(), settings, critic=critic)
    prepared = learner._prepare(rows, found).rows.loss
    np.testing.assert_array_equal(prepared.advantages, advantages.astype(np.float32))


def test_what_is_given_before_the_first_sampled_token_is_nobodys(part):
    given = np.zeros(24, np.float32)
    given[6] = 7.0
    column = Column(axis=ColumnAxis.TOKEN, values=given)
    rows = TrainRows.from_parts([replace(part, columns={**part.columns, "token_rewards": column})])
    assert not rows.loss.rewards.any()
