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
