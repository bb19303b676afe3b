"""Whatever agents send and say, answers are whole or typed errors, and nothing sampled is lost."""

import pytest

import agent_fuzz
import agent_turns


@pytest.mark.slow
async def test_no_body_is_answered_with_anything_else():
    found = await agent_fuzz.fuzz(750, seed=20_261_122)
    assert found.wrong == []
    assert found.statuses[200] > 50
    assert found.statuses[400] > 400


@pytest.mark.slow
async def test_what_was_sampled_in_conversations_is_what_a_trainer_gets():
    found = await agent_turns.fuzz(250, seed=20_261_123)
    assert found.differences == []
    assert found.did["called"] > 20
    assert found.did["called in parallel"] > 0
