import pytest

from astraflow.core.evals import EvalAccumulator, EvalDataSet, overall, pass_at_k


def tally(repeats=4, name="main"):
    settings = EvalDataSet(
        data_set=name, workflow_id="w", prompt_count=2, repeats=repeats, correct_reward=1.0
    )
    return EvalAccumulator(settings, 2)


def test_pass_at_k_is_unbiased():
    assert pass_at_k(scored=4, correct=1, k=1) == 0.25
    assert pass_at_k(scored=4, correct=1, k=2) == pytest.approx(0.5)
    assert pass_at_k(scored=4, correct=0, k=4) == 0
    assert pass_at_k(scored=4, correct=3, k=2) == 1


def test_averages_are_over_prompts_first():
    data = tally()
    for rewards in ([1.0, 1.0, 0.0, 0.0], [1.0]):
        for reward in rewards:
            data.add(reward, {"turns": 2.0})
        data.close(rewards)
    data.missing_count = 3
    result = data.result()
    assert result.avg_at_k == 0.75
    assert result.mean_reward == pytest.approx(0.6)
    assert result.pass_at_k == {1: 0.75, 2: pytest.approx(5 / 6), 4: 1.0}
    assert result.metrics == {"turns": 2.0}
    assert result.missing_count == 3


def test_a_metric_is_the_mean_of_the_rollouts_that_have_it():
    data = tally()
    for metrics in ({}, {"turns": 2.0}, {"turns": 4.0, "tests": 1.0}, {}):
        data.add(1.0, metrics)
    assert data.result().metrics == {"tests": 1.0, "turns": 3.0}


def test_sums_of_an_older_release_are_of_all_rollouts():
    data = tally()
    data.scored_count, data._metric_sums = 4, {"turns": 4.0, "tests": 2.0}
    data.add(1.0, {"turns": 6.0})
    assert data.result().metrics == {"tests": 0.4, "turns": 2.0}


def test_data_sets_count_alike():
    one, two = tally(name="one"), tally(name="two")
    one.add(1.0, {})
    one.close([1.0])
    for reward in (0.0, 0.0):
        two.add(reward, {})
        two.close([reward])
    mean = overall([one.result(), two.result()])
    assert (mean.avg_at_k, mean.mean_reward, mean.prompt_count) == (0.5, 0.5, 4)
    assert overall([]) is None
