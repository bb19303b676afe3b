import pytest

from astraflow.core.pool.capacity import Measured, Speed, size_of
from astraflow.core.tasks import Prompt


def test_first_rollout_is_taken_at_its_word():
    speed = Speed()
    speed.note(seconds=2.0, token_count=100, outstanding=8)
    assert (speed.token_s, speed.load, speed.tokens_per_s) == (0.02, 8, 400)


def test_mean_follows_what_changes():
    speed = Speed()
    speed.note(seconds=1.0, token_count=100, outstanding=8)
    for _ in range(64):
        speed.note(seconds=3.0, token_count=100, outstanding=8)
    assert speed.token_s == pytest.approx(0.03, rel=0.02)


def test_more_than_it_had_takes_longer():
    speed = Speed(token_s=0.01, load=16)
    assert 100 * speed.pace_s(outstanding=8, count=8) == 1.0
    assert 100 * speed.pace_s(outstanding=16, count=8) == 1.5


def test_a_member_that_was_idle_for_a_while_is_no_small_one():
    speed = Speed(token_s=0.01, load=4, capacity=16)
    assert 100 * speed.pace_s(outstanding=8, count=8) == 1.0
    assert 100 * speed.pace_s(outstanding=16, count=8) == 1.5


def test_long_prompts_are_expected_to_cost_more():
    measured = Measured()
    assert measured.expected_tokens(100) == 0
    measured.note(50, [])
    assert measured.expected_tokens(100) == 50
    measured.note_prompt(100)
    assert [measured.expected_tokens(size) for size in (100, 200, 1, 10_000)] == [50, 100, 25, 200]


def test_fastest_is_looked_up_now_and_then():
    measured, pool = Measured(), [Speed(token_s=0.02, load=1), Speed()]
    measured.note(1, pool)
    assert measured.fastest_token_s == 0.02
    pool[1].note(seconds=1, token_count=100, outstanding=1)
    for _ in range(64):
        measured.note(1, pool)
    assert measured.fastest_token_s == 0.01


def test_a_member_alone_is_as_fast_as_the_fastest_however_slow_it_gets():
    measured, alone = Measured(), Speed(token_s=0.01, load=1)
    measured.note(1, [alone])
    alone.note(seconds=10, token_count=1, outstanding=1)
    measured.note(1, [alone])
    assert measured.fastest_token_s == alone.token_s


def test_size_of_a_prompt_is_that_of_its_texts():
    fields = {"messages": [{"role": "user", "content": "abc"}], "level": 3}
    assert size_of(Prompt(prompt_id="p", data_set="d", fields=fields)) == 8
