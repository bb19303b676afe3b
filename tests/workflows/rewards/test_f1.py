"""Short answers, compared as SQuAD does."""

import pytest

from astraflow.core.errors import AstraflowError
from astraflow.core.tasks import Prompt
from astraflow.workflows.rewards.answers import exact_match, gold_answers, normalised, token_f1
from astraflow.workflows.rewards.compare import F1


def prompt(**fields):
    return Prompt(prompt_id="p", data_set="d", fields=fields)


def test_a_text_is_normalised_as_the_official_script_does():
    assert normalised(" The  U.S.A., an Isle! ") == "usa isle"


@pytest.mark.parametrize(
    ("answer", "gold", "em", "f1"),
    [
        ("Paris", "paris.", 1.0, 1.0),
        ("Paris, France", "Paris", 0.0, 2 / 3),
        ("Lima", "Paris", 0.0, 0.0),
        # Words count as often as they stand there.
        ("new new new", "new york", 0.0, 0.4),
        ("", "Paris", 0.0, 0.0),
        # What is an article or punctuation alone is not the empty answer.
        ("", "A", 0.0, 0.0),
        ("the", "a", 0.0, 0.0),
        ("(A).", "A", 1.0, 1.0),
        ("", "!", 0.0, 0.0),
        ("?", "!", 0.0, 0.0),
        ("!", "!", 1.0, 1.0),
        ("", "", 1.0, 1.0),
    ],
)
def test_em_and_f1(answer, gold, em, f1):
    assert exact_match(answer, gold) == em
    assert token_f1(answer, gold) == pytest.approx(f1)


def test_the_best_of_several_right_answers_counts():
    score = F1(F1.Options())(prompt(answer=["NYC", "New York City"]), "New York")
    assert score.reward == score.metrics["f1"] == pytest.approx(0.8)
    assert score.metrics["em"] == 0.0


def test_an_answer_may_stand_in_a_tag():
    scorer = F1(F1.Options(tag="answer", reward="em", field="gold"))
    assert scorer(prompt(gold="4"), "<answer>3</answer> no, <answer>4</answer>").reward == 1.0
    assert scorer(prompt(gold="4"), "4").reward == 0.0
    mentioned = "It has to stand in <answer>: <answer>4</answer>"
    assert scorer(prompt(gold="4"), mentioned).reward == 1.0


def test_a_row_without_an_answer_is_told():
    with pytest.raises(AstraflowError, match="has no field 'answer'"):
        F1(F1.Options())(prompt(question="?"), "x")
    for unsound in ([], [None], [["x"]], {"a": 1}):
        with pytest.raises(ValueError, match="text or a list of texts"):
            gold_answers(unsound)
    assert gold_answers([3, "3.0"]) == ["3", "3.0"]
