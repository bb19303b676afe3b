import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.rewards.compare import Exact

PROMPT = Prompt(prompt_id=PromptId("p"), data_set="train", fields={"answer": "Bee"})


@pytest.mark.parametrize(
    ("options", "text", "reward"),
    [
        ({}, "Bee", 1.0),
        ({}, " Bee\n", 1.0),
        ({}, "bee", 0.0),
        ({"ignore_case": True}, "bee", 1.0),
        ({"strip": False}, " Bee", 0.0),
    ],
)
def test_only_the_answer_is_worth_something(options, text, reward):
    assert Exact(Exact.Options(**options))(PROMPT, text).reward == reward


def test_a_prompt_without_an_answer_is_the_scorers_failure():
    with pytest.raises(AstraflowError, match="no field 'target', only answer") as caught:
        Exact(Exact.Options(field="target"))(PROMPT, "Bee")
    assert caught.value.reason is Reason.SCORER_FAILED


def test_null_is_no_answer():
    prompt = Prompt(prompt_id=PromptId("p"), data_set="train", fields={"answer": None})
    with pytest.raises(AstraflowError, match="null in its field 'answer'") as caught:
        Exact(Exact.Options())(prompt, "None")
    assert caught.value.reason is Reason.SCORER_FAILED


def test_the_answer_that_it_calls_right_is_right():
    scorer = Exact(Exact.Options(ignore_case=True))
    assert scorer(PROMPT, scorer.gold(PROMPT)).reward == 1.0
