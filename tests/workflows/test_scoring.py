import numpy as np
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


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("1.0", "returned str '1.0', not a number or a Score"),
        (None, "returned NoneType None"),
        ([1.0], "returned list"),
        (float("nan"), "gave a reward of float nan"),
        (Score(reward="high"), "gave a reward of str 'high'"),
        (Score(reward=1.0, parts={"tool": object()}), "gave parts with str 'tool': object"),
        (Score(reward=1.0, parts=[1.0]), "gave parts of list"),
        (Score(reward=1.0, metrics={1: 1.0}), "gave metrics with int 1"),
    ],
)
async def test_what_is_no_score_is_the_scorers_failure_at_its_definition(score, said):
    def odd(prompt, text):  # defined here
        return score

    with pytest.raises(AstraflowError, match="scorer mine") as caught:
        await GuardedScorer(odd, name="mine")(PROMPT, "x")
    assert caught.value.reason is Reason.SCORER_FAILED
    assert said in caught.value.message
    assert "# defined here" in caught.value.traceback


async def test_numbers_of_other_kinds_become_floats():
    given = Score(reward=np.float32(0.5), parts={"form": np.int64(1)}, metrics={"ok": True})
    score = await GuardedScorer(lambda *_: given, name="s")(PROMPT, "x")
    assert score == Score(reward=0.5, parts={"form": 1.0}, metrics={"ok": 1.0})
    numbers = (score.reward, score.parts["form"], score.metrics["ok"])
    assert {type(number) for number in numbers} == {float}


async def test_a_failure_says_the_line_of_the_scorer():
    def fail(prompt, text):
        return {}[text]  # the line

    with pytest.raises(AstraflowError) as caught:
        await GuardedScorer(fail, name="mine")(PROMPT, "x")
    assert caught.value.cause.startswith("KeyError at test_scoring.py:")
    assert "# the line" in caught.value.traceback
