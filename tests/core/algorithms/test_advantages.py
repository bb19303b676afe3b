from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.core.algorithms.advantages import advantages_of, overlong_penalty, stamp
from astraflow.core.errors import AstraflowError
from astraflow.core.samples import Row
from astraflow.core.settings import AdvantageSettings, Baseline, OverlongSettings

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=16)


def of(values, baseline=Baseline.GROUP, *, scale=False):
    made = AdvantageSettings(baseline=baseline, scale_by_std=scale)
    return advantages_of(np.array(values), made)


@settings(max_examples=50)
@given(rewards, st.booleans())
def test_advantages_of_a_group_sum_to_zero(values, scale):
    assert of(values, scale=scale).sum() == pytest.approx(0, abs=1e-4)


@settings(max_examples=50)
@given(rewards)
def test_leaving_one_out_compares_each_with_the_mean_of_the_others(values):
    for index, advantage in enumerate(of(values, Baseline.LEAVE_ONE_OUT)):
        others = values[:index] + values[index + 1 :]
        mean = sum(others) / len(others) if others else 0
        assert advantage == pytest.approx(values[index] - mean, abs=1e-9)


@pytest.mark.parametrize("baseline", [Baseline.GROUP, Baseline.LEAVE_ONE_OUT])
@pytest.mark.parametrize("reward", [0.5, 0.1, -0.7, 1 / 3])
def test_equal_rewards_give_no_advantage(baseline, reward):
    for count in range(2, 33):
        for scale in (False, True):
            assert not of([reward] * count, baseline, scale=scale).any()


def test_without_a_baseline_rewards_are_advantages():
    assert of([1.0, 0.0, 0.25], Baseline.NONE).tolist() == [1.0, 0.0, 0.25]


def test_scaled_advantages_have_unit_deviation():
    """verl divides by torch.std, which is that of a sample; the other is a key."""
    values = np.array([0.0, 0.0, 1.0, 0.5])
    for ddof, is_population in ((1, False), (0, True)):
        made = AdvantageSettings(scale_by_std=True, is_population_std=is_population)
        assert advantages_of(values, made).std(ddof=ddof) == pytest.approx(1, abs=1e-4)
    assert of([0.5], scale=True).tolist() == [0.0]
    assert of([0.5], Baseline.NONE, scale=True).tolist() == [0.5]


@pytest.fixture
def _own_code(tmp_path, monkeypatch):
    (tmp_path / "a_users_advantages.py").write_text(
        "import numpy as np\n"
        "def best_of(rewards):\n"
        "    return np.where(rewards == rewards.max(), 1.0, 0.0)\n"
        "def one_number(rewards):\n"
        "    return rewards.mean()\n"
        "def odd(rewards):\n"
        "    return rewards / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_own_code")
def test_an_estimator_of_the_users_takes_the_place_of_the_baseline():
    made = AdvantageSettings(estimator="a_users_advantages:best_of", scale_by_std=True)
    assert advantages_of(np.array([0.0, 2.0, 1.0]), made).tolist() == [0, 1, 0]


@pytest.mark.usefixtures("_own_code")
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("one_number", r"not one finite advantage for each"),
        ("odd", r"not one finite advantage for each"),
        ("absent", "cannot be loaded"),
    ],
)
def test_an_estimator_that_returns_something_else_is_named(name, why):
    made = AdvantageSettings(estimator=f"a_users_advantages:{name}")
    with pytest.raises(AstraflowError, match=why):
        advantages_of(np.array([0.0, 2.0, 1.0]), made)


def test_length_costs_nothing_then_more_and_more_then_all():
    costs = OverlongSettings(max_tokens=10, buffer_tokens=4, penalty=2.0)
    assert [overlong_penalty(count, costs) for count in (0, 6, 7, 9, 10, 99)] == [
        *(0.0, 0.0, 0.5, 1.5, 2.0, 2.0)
    ]


def test_rows_are_compared_with_those_of_the_same_agent(trajectory):
    def row(name, agent, reward):
        made = replace(trajectory(name), agent=agent)
        return Row(trajectory=made, rollout=None, reward=reward, min_version=0, max_version=0)

    rows = [
        *(row("a", "solver", 1.0), row("b", "solver", 0.0)),
        *(row("c", "solver/2", 1.0), row("d", "verifier", 0.0), row("e", "verifier", 1.0)),
    ]
    stamp(rows, AdvantageSettings())
    assert [each.advantage for each in rows] == [0.5, -0.5, 0.0, -0.5, 0.5]
    assert [each.group_mean for each in rows] == [0.5, 0.5, 1.0, 0.5, 0.5]
    assert [each.group_std for each in rows] == [0.5, 0.5, 0.0, 0.5, 0.5]
    equal = [row(name, "", 0.1) for name in "abcdef"]
    stamp(equal, AdvantageSettings())
    assert {(each.group_mean, each.group_std) for each in equal} == {(0.1, 0.0)}
    second = AdvantageSettings(baseline=Baseline.NONE)
    stamp(rows, AdvantageSettings(agents={"solver/2": second, "verifier": second}))
    assert [each.advantage for each in rows] == [0.5, -0.5, 1.0, 0.0, 1.0]
