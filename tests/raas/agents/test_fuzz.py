"""Whatever a body is, the answer is a whole one or a typed error."""

import pytest

import agent_fuzz


@pytest.mark.slow
async def test_no_body_is_answered_with_anything_else():
    found = await agent_fuzz.fuzz(750, seed=20_261_122)
    assert found.wrong == []
    assert found.statuses[200] > 50
    assert found.statuses[400] > 400
