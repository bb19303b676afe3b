from collections import Counter

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError
from astraflow.workflows.building import build_tutor
from astraflow.workflows.letter_sort import is_held_out, kind_of, sort_letters

TUTORS = ("letter_sort", "letter_sort_retry", "letter_sort_verifier")


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
    kinds = Counter(kind_of(pair.prompt[:-1], pair.completion) for pair in pairs("letter_sort"))
    assert 0.25 < kinds["right"] / 600 < 0.42
    assert min(kinds[kind] for kind in ("descending", "copy", "lost_letter")) > 90
    assert "other" not in kinds


def test_the_retry_tutor_shows_up_to_two_wrong_tries():
    tries = Counter(pair.prompt.count("<eos>!") for pair in pairs("letter_sort_retry"))
    assert set(tries) == {0, 1, 2}


def test_the_verifier_tutor_is_right_about_half_right_answers():
    verdicts = Counter[str]()
    for pair in pairs("letter_sort_verifier"):
        letters, _, answer = pair.prompt.rstrip("?").partition(">")
        assert pair.completion == ("y" if answer == sort_letters(letters) else "n")
        verdicts[pair.completion] += 1
    assert 0.45 < verdicts["y"] / 600 < 0.65


def test_the_vocabulary_of_sorting_has_fourteen_tokens():
    config = build_tutor("letter_sort", {}).model_config()
    assert config["vocab_size"] == 14
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(AstraflowError, match="did you mean 'accuracy'"):
        build_tutor("letter_sort", {"acuracy": 0.5})
