import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from astraflow.workflows.letter_sort import (
    draw_training_letters,
    is_held_out,
    kind_of,
    prompt_rows,
)

COMMITTED = Path(__file__).parents[3] / "recipes" / "letter_sort"


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
