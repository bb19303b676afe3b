import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.protocol import PolicyFault, Score
from astraflow.workflows.scoring import GuardedScorer

PROMPT = Prompt(prompt_id=PromptId("p"), data_set="train", fields={"answer": "7"})


async def says_half(prompt, text):
    return 0.5


@pytest.mark.parametrize(
    ("scorer", "reward"),
    [(lambda *_: 1, 1.0), (lambda *_: Score(reward=2.0), 2.0), (says_half, 0.5)],
)
async def test_whatever_a_scorer_gives_is_a_score(scorer, reward):
    assert await GuardedScorer(scorer, name="s")(PROMPT, "x") == Score(reward=reward)


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("by zero"), AstraflowError(Reason.INVALID_FIELD, "odd")]
)
async def test_whatever_it_raises_is_its_failure(error):
    def fail(prompt, text):
        raise error

    with pytest.raises(AstraflowError) as caught:
        await GuardedScorer(fail, name="mine")(PROMPT, "x")
    assert caught.value.reason is Reason.SCORER_FAILED
    assert "mine" in caught.value.message
    assert "prompt p" in caught.value.message


async def test_a_fault_of_the_policy_goes_through():
    def fail(prompt, text):
        raise PolicyFault("its program crashed")

    with pytest.raises(PolicyFault, match="its program crashed"):
        await GuardedScorer(fail, name="mine")(PROMPT, "x")


async def test_an_exit_is_the_scorers_failure():
    def leave(prompt, text):
        raise SystemExit("bye")

    with pytest.raises(AstraflowError, match="SystemExit") as caught:
        await GuardedScorer(leave, name="mine")(PROMPT, "x")
    assert caught.value.reason is Reason.SCORER_FAILED
