from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.letter_sort import LetterSort

PROMPT = Prompt(prompt_id=PromptId("p"), data_set="train", fields={"prompt": "cab>"})


def test_parts_name_the_kind_of_answer():
    score = LetterSort(LetterSort.Options())(PROMPT, "cba")
    assert score.reward == 0.0
    assert [name for name, part in score.parts.items() if part] == ["descending"]
    assert set(score.parts) == {"right", "descending", "copy", "lost_letter", "other"}


def test_only_sorted_letters_are_rewarded():
    assert LetterSort(LetterSort.Options())(PROMPT, "abc").reward == 1.0


def test_the_answer_that_it_calls_right_is_right():
    assert LetterSort(LetterSort.Options()).gold(PROMPT) == "abc"
