"""Stored answers: what rows of preference data sets have, whatever form they are in."""

import pytest

from astraflow.core.errors import Reason
from astraflow.workflows.runner import run_episode
from astraflow.workflows.stored import Stored, StoredOptions

ASKED = {"role": "user", "content": "2 + 2?"}


@pytest.fixture
def laid_down(parrot, episode, loaded):
    """Lay the one answer of a row down; return its rollout."""

    async def run(answer):
        made = Stored(StoredOptions(answers={"chosen": 1.0}), None)
        fields = {"prompt": "2 + 2?", "chosen": answer}
        return await run_episode(loaded(made), episode(solver=parrot(), fields=fields))

    return run


@pytest.mark.parametrize(
    "answer",
    [
        "Four.",
        [ASKED, {"role": "assistant", "content": "Four."}],
        [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "Four."}]}],
        [{"role": "assistant", "content": "Four.", "tool_calls": None, "name": None}],
    ],
)
async def test_an_answer_is_its_text(laid_down, answer):
    rollout = await laid_down(answer)
    (trajectory,) = rollout.trajectories
    said = trajectory.tokens[trajectory.sampled_mask].tolist()
    assert "".join(map(chr, said)) == "Four."


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "null in its field 'chosen'"),
        ([], "'chosen' neither a text nor messages"),
        (4, "'chosen' neither a text nor messages"),
        ([ASKED], "messages that end with the assistant's"),
        (
            [
                ASKED,
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            ],
            "messages that end with the assistant's",
        ),
    ],
)
async def test_what_is_no_answer_is_told(laid_down, answer, why):
    failure = (await laid_down(answer)).failure
    assert failure.reason is Reason.INVALID_FIELD
    assert why in failure.message
