"""What the recipes of letter sort are made of: the data, the scorer, the tutors."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from letter_sort import (
    LetterSort,
    draw_training_letters,
    is_held_out,
    kind_of,
    prompt_rows,
    sort_letters,
)

from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.building import build_tutor

COMMITTED = Path(__file__).parents[2] / "recipes" / "letter_sort"
PROMPT = Prompt(prompt_id=PromptId("p"), data_set="train", fields={"prompt": "cab>"})
TUTORS = ("letter_sort:SortTutor", "letter_sort:RetryTutor", "letter_sort:VerifierTutor")


@pytest.mark.parametrize(
    ("letters", "answer", "kind"),
    [
        ("dbca", "abcd", "right"),
        ("dbca", "dcba", "descending"),
        ("dbca", "dbca", "copy"),
        ("dbca", "abd", "lost_letter"),
        ("dbca", "adb", "other"),
        ("aab", "ab", "lost_letter"),
        ("aab", "b", "other"),
        ("abc", "abc", "right"),
        ("dbca", "", "other"),
        ("dbca", "abcdd", "other"),
    ],
)
def test_answers_have_kinds(letters, answer, kind):
    assert kind_of(letters, answer) == kind


def test_what_is_held_out_is_never_drawn_for_training():
    rng = np.random.default_rng(0)
    assert not any(is_held_out(draw_training_letters(rng)) for _ in range(500))


@pytest.mark.parametrize(("name", "count"), [("train", 4096), ("held_out", 2048)])
def test_the_committed_prompts_are_those_of_the_script(name, count):
    lines = (COMMITTED / f"{name}.jsonl").read_text().splitlines()
    rows = list(prompt_rows(count, held_out=name == "held_out", seed=0))
    assert [json.loads(line) for line in lines] == rows
    assert len({row["id"] for row in rows}) == count
    assert all(is_held_out(row["id"]) == (name == "held_out") for row in rows)


def test_lengths_have_equal_shares():
    lengths = Counter(len(row["id"]) for row in prompt_rows(400, held_out=True, seed=1))
    assert lengths.keys() == {3, 4, 5, 6}
    assert min(lengths.values()) > 60


def test_parts_name_the_kind_of_answer():
    score = LetterSort(LetterSort.Options())(PROMPT, "cba")
    assert score.reward == 0.0
    assert [name for name, part in score.parts.items() if part] == ["descending"]
    assert set(score.parts) == {"right", "descending", "copy", "lost_letter", "other"}


def test_only_sorted_letters_are_rewarded():
    assert LetterSort(LetterSort.Options())(PROMPT, "abc").reward == 1.0


def test_the_answer_that_it_calls_right_is_right():
    assert LetterSort(LetterSort.Options()).gold(PROMPT) == "abc"


def pairs(name, count=600, **options):
    tutor = build_tutor(name, options)
    rng = np.random.default_rng(3)
    return [tutor.pair(rng) for _ in range(count)]


@pytest.mark.parametrize("name", TUTORS)
def test_pairs_are_made_of_the_alphabet(name):
    tutor = build_tutor(name, {})
    written = {
        character
        for pair in pairs(name)
        for character in (pair.prompt + pair.completion).replace("<eos>", "")
    }
    assert written == set(tutor.alphabet)


@pytest.mark.parametrize("name", TUTORS)
def test_pairs_follow_from_the_generator_alone(name):
    assert pairs(name, 50) == pairs(name, 50)


@pytest.mark.parametrize("name", TUTORS)
def test_tutors_keep_off_what_is_held_out(name):
    assert not any(is_held_out(pair.prompt.partition(">")[0]) for pair in pairs(name, 200))


def test_the_sloppy_tutor_is_right_three_times_in_ten():
    kinds = Counter(
        kind_of(pair.prompt[:-1], pair.completion) for pair in pairs("letter_sort:SortTutor")
    )
    assert 0.25 < kinds["right"] / 600 < 0.42
    assert min(kinds[kind] for kind in ("descending", "copy", "lost_letter")) > 90
    assert "other" not in kinds


def test_the_retry_tutor_shows_up_to_two_wrong_tries():
    tries = Counter(pair.prompt.count("<eos>!") for pair in pairs("letter_sort:RetryTutor"))
    assert set(tries) == {0, 1, 2}


def test_the_verifier_tutor_is_right_about_half_right_answers():
    verdicts = Counter[str]()
    for pair in pairs("letter_sort:VerifierTutor"):
        letters, _, answer = pair.prompt.rstrip("?").partition(">")
        assert pair.completion == ("y" if answer == sort_letters(letters) else "n")
        verdicts[pair.completion] += 1
    assert 0.45 < verdicts["y"] / 600 < 0.65


def test_the_vocabulary_of_sorting_has_fourteen_tokens():
    config = build_tutor("letter_sort:SortTutor", {}).model_config()
    assert config["vocab_size"] == 14
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(AstraflowError, match="did you mean 'accuracy'"):
        build_tutor("letter_sort:SortTutor", {"acuracy": 0.5})
