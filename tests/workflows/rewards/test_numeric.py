import pytest

from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.rewards.compare import Numeric, last_number


def prompt(answer):
    return Prompt(prompt_id=PromptId("p"), data_set="train", fields={"answer": answer})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 3.", 3.0),
        ("1 + 2 = -4", -4.0),
        ("it is \u22125", -5.0),
        ("$1,250.50", 1250.5),
        ("6.02e23 of them", 6.02e23),
        (".5", 0.5),
        ("none", None),
    ],
)
def test_the_last_number_counts(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("answer", "text", "reward", "none"),
    [("#### 12", "so 12", 1.0, 0.0), (12, "11", 0.0, 0.0), (12.0, "who knows", 0.0, 1.0)],
)
def test_equal_numbers_are_right(answer, text, reward, none):
    score = Numeric(Numeric.Options())(prompt(answer), text)
    assert (score.reward, score.parts["none"]) == (reward, none)


def test_an_answer_without_a_number_is_the_scorers_failure():
    with pytest.raises(AstraflowError, match="no number"):
        Numeric(Numeric.Options())(prompt("many"), "3")


@pytest.mark.parametrize("answer", ["1e400", 10**400], ids=["text", "integer"])
def test_an_answer_beyond_all_floats_is_the_scorers_failure_and_not_equal_to_any(answer):
    with pytest.raises(AstraflowError, match="beyond all floats"):
        Numeric(Numeric.Options())(prompt(answer), "3")


def test_the_answer_that_it_calls_right_is_right():
    scorer = Numeric(Numeric.Options())
    for answer in ("#### 12", 12, 1.5):
        assert scorer(prompt(answer), scorer.gold(prompt(answer))).reward == 1.0
