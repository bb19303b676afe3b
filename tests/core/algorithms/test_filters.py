from dataclasses import replace
from datetime import timedelta

from astraflow.core.algorithms.filters import Length, RewardRange, Route, Truncated, ZeroAdvantage
from astraflow.core.rollouts import Outcome

CUT, DONE = Outcome.TRUNCATED, Outcome.SCORED


def test_equal_rewards_are_dropped(whole):
    keep = ZeroAdvantage().keeps
    assert keep(whole(1.0, 1.0, 1.0)) == [False] * 3
    assert keep(whole(1.0, 0.0, 1.0)) == [True] * 3


def test_rewards_of_agents_with_other_tasks_are_not_compared(whole):
    def of(*agents):
        group = whole(1.0, 0.0, 1.0, 0.0)
        for sample, agent in zip(group.samples, agents, strict=True):
            (row,) = sample.rows
            row.trajectory = replace(row.trajectory, agent=agent)
        return ZeroAdvantage().keeps(group)

    assert of("first", "second", "first", "second") == [False] * 4
    assert of("first", "first", "second", "second") == [True] * 4


def test_mean_reward_has_to_be_in_range(whole):
    keep = RewardRange(low=0.2, high=0.8).keeps
    assert keep(whole(1.0, 0.0, 0.0, 0.0)) == [True] * 4
    assert keep(whole(1.0, 1.0, 1.0, 1.0)) == [False] * 4
    assert keep(whole(0.2)) == [True]


def test_rollouts_that_are_too_long_are_dropped(whole):
    group = whole((1.0, 80, DONE), (0.0, 100, DONE), (1.0, 101, DONE))
    assert Length(max_tokens=100).keeps(group) == [True, True, False]
    assert Length(min_tokens=100).keeps(group) == [False, True, True]


def test_rollouts_that_were_cut_are_dropped(whole):
    group = whole((1.0, 1, CUT), (0.0, 1, DONE), (0.0, 1, CUT), (1.0, 1, DONE))
    assert Truncated().keeps(group) == [False, True, False, True]
    assert Truncated(max_share=0.4).keeps(group) == [False] * 4


def test_rollouts_that_were_cut_may_be_masked(whole):
    group = whole((1.0, 1, CUT), (0.0, 1, DONE))
    mask = Truncated(action="mask")
    assert (mask.keeps(group), mask.masks(group)) == ([True, True], [True, False])
    assert Truncated(action="mask", max_share=0.4).keeps(group) == [False, False]


def test_a_group_goes_to_the_policies_that_have_a_rule_for_it(whole, prompt):
    route = Route(policies={"small": ({"data_sets": ["easy"]}, {"max_reward": 0.5})})
    easy = prompt(data_set="easy")
    assert route.keeps(whole(1.0, policy_id="small", prompt=easy)) == [True]
    assert route.keeps(whole(1.0, 1.0, policy_id="small")) == [False, False]
    assert route.keeps(whole(1.0, 0.0, policy_id="small")) == [True, True]
    assert route.keeps(whole(1.0, policy_id="large")) == [True]


def test_rules_are_about_task_type_staleness_and_time(whole, prompt):
    def fits(group, **rule):
        return Route(policies={"solver": (rule,)}).keeps(group) == [True]

    code = prompt(labels={"task": "code"}, fields={"level": 3})
    assert fits(whole(1.0, prompt=code), labels={"task": "code"})
    assert fits(whole(1.0, prompt=code), labels={"task": "code", "level": "3"})
    assert not fits(whole(1.0, prompt=code), labels={"task": "math"})
    assert fits(whole(1.0, version=4, train_version=5), max_staleness=1)
    assert not fits(whole(1.0, version=3, train_version=5), max_staleness=1)
    late = whole(1.0, run_time=timedelta(seconds=60))
    assert fits(late, from_s=60.0)
    assert not fits(late, until_s=60.0)
    assert not fits(whole(0.4), min_reward=0.5)
