import pytest

from astraflow.core.algorithms.selection import Curriculum, FilterSolved, Greso, UniformSelector

EASY, HARD, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


def test_uniform_admits_everything(prompt, dice, outcome):
    selector = UniformSelector()
    selector.note(outcome("p", *EASY))
    assert all(selector.admits(prompt(), dice) for _ in range(9))
    assert dice.count == 0


def test_a_prompt_is_solved_after_29_groups_that_pass(prompt, dice, outcome):
    selector = FilterSolved()
    admitted = 0
    while selector.admits(prompt(), dice):
        admitted += 1
        selector.note(outcome("p", *EASY))
        if admitted <= 3:
            assert selector.rates["p"] == pytest.approx([0.1, 0.19, 0.271][admitted - 1])
    assert admitted == 29
    assert selector.metrics() == {"solved": 1, "known": 1}
    selector.note(outcome("p", *HARD))
    assert selector.admits(prompt(), dice)


def test_rewards_above_zero_pass(outcome):
    selector = FilterSolved(decay=0.0)
    selector.note(outcome("p", 0.1, -1.0, 0.0, 2.0))
    assert selector.rates["p"] == 0.5


def test_curriculum_asks_most_for_what_is_half_solved(outcome):
    selector = Curriculum(decay=0.0)
    assert selector.chance("p") == 1
    for rewards, chance in (((0.5,), 1.0), ((0.75,), 0.5), (EASY, 0.1), (HARD, 0.1)):
        selector.note(outcome("p", *rewards))
        assert selector.chance("p") == pytest.approx(chance)
    assert selector.metrics() == {"known": 1, "mean_rate": 0}


def test_curriculum_admits_as_often_as_it_says(prompt, dice, outcome):
    selector = Curriculum(decay=0.0)
    selector.note(outcome("p", 0.75))
    admitted = sum(selector.admits(prompt(), dice) for _ in range(1000))
    assert 450 < admitted < 550


def test_greso_has_the_published_defaults():
    greso = Greso()
    assert (greso.p_easy, greso.p_hard, greso.delta_p) == (0.5, 0.5, 0.01)
    assert (greso.alpha_easy, greso.alpha_hard) == (0.083, 0.167)
    assert (greso.p_min, greso.p_max, greso.correct_threshold) == (0.01, 0.99, 0.5)
    assert (greso.min_submit_easy, greso.min_submit_hard) == (0.10, 0.40)


def test_greso_asks_less_for_what_taught_nothing_several_times(outcome):
    greso = Greso()
    chances = [greso.chance("p")]
    for rewards in (HARD, HARD, EASY, EASY, EASY, EASY, MIXED):
        greso.note(outcome("p", *rewards))
        chances.append(greso.chance("p"))
    assert chances == [1, 0.5, 0.4, 0.5, 0.25, 0.125, 0.1, 1]


def test_greso_calls_equal_rewards_easy_above_the_threshold(outcome):
    greso = Greso()
    greso.note(outcome("a", 0.6, 0.6))
    greso.note(outcome("b", 0.5, 0.5))
    assert (greso.streaks["a"], greso.streaks["b"]) == (("easy", 1), ("hard", 1))


def test_greso_moves_its_probabilities_with_each_version_once_armed(outcome):
    greso = Greso()
    # One of ten easy is at least 0.083; one of ten hard is below 0.167.
    groups = [EASY, HARD] + [MIXED] * 8
    for version in (1, 2):
        for number, rewards in enumerate(groups):
            greso.note(outcome(f"p{number}", *rewards))
        greso.begin_version(version)
        greso.end_warm_up()
    assert greso.metrics() == {
        "p_easy": pytest.approx(0.49),
        "p_hard": pytest.approx(0.51),
        "observed_easy_ratio": 0.1,
        "observed_hard_ratio": 0.1,
        "adjustment_armed": 1,
    }
    greso.begin_version(3)
    assert greso.p_easy == pytest.approx(0.49)


def test_greso_keeps_its_probabilities_in_bounds(outcome):
    greso = Greso(p_easy_init=0.02, delta_p=0.015)
    greso.end_warm_up()
    for version in range(3):
        greso.note(outcome("p", *EASY))
        greso.begin_version(version)
    assert greso.p_easy == 0.01
    assert greso.p_hard == pytest.approx(0.545)


def test_greso_admits_as_often_as_it_says(prompt, dice, outcome):
    greso = Greso()
    greso.note(outcome("p", *HARD))
    assert 450 < sum(greso.admits(prompt(), dice) for _ in range(1000)) < 550


def test_a_group_without_rewards_teaches_nothing(outcome):
    for selector in (FilterSolved(), Curriculum(), Greso()):
        before = selector.metrics()
        selector.note(outcome("p"))
        assert selector.metrics() == before
