"""The task: letters, their answer, the kinds of wrong answer, and the prompts of the recipes."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice, zip_longest

import numpy as np

LETTERS = "abcdefghij"
ASK = ">"
LENGTHS = (3, 4, 5, 6)
_LETTER_OF_DIGIT = str.maketrans("0123456789", LETTERS)


class Answer(StrEnum):
    """What kind of answer it is; an answer that is of two kinds is of the first."""

    RIGHT = "right"
    DESCENDING = "descending"
    COPY = "copy"
    LOST_LETTER = "lost_letter"
    OTHER = "other"


def draw_letters(rng: np.random.Generator) -> str:
    """Return letters to sort: every length is as likely as any other."""
    length = int(rng.choice(LENGTHS))
    return "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), length))


def sort_letters(letters: str) -> str:
    """Return the right answer."""
    return "".join(sorted(letters))


def kind_of(letters: str, answer: str) -> Answer:
    """Say what kind of answer it is.

    Example:
        >>> [kind_of("dbca", answer).value for answer in ("abcd", "dcba", "dbca", "abd", "aa")]
        ['right', 'descending', 'copy', 'lost_letter', 'other']
    """
    right = sort_letters(letters)
    if answer == right:
        return Answer.RIGHT
    if answer == right[::-1]:
        return Answer.DESCENDING
    if answer == letters:
        return Answer.COPY
    if answer == sort_letters(answer) and _misses_one(letters, answer):
        return Answer.LOST_LETTER
    return Answer.OTHER


def is_held_out(letters: str) -> bool:
    """Whether these letters are kept from tutors and training: about half of all are."""
    return hashlib.blake2b(letters.encode(), digest_size=1).digest()[0] % 2 == 0


def draw_training_letters(rng: np.random.Generator) -> str:
    """Return letters to sort that are not held out."""
    while is_held_out(letters := draw_letters(rng)):
        pass
    return letters


def prompt_rows(count: int, *, held_out: bool, seed: int) -> Iterator[dict[str, str]]:
    """Yield distinct prompts as rows of a data set, the lengths in turn while they last."""
    rng = np.random.default_rng(seed)
    pools = [_shuffled(length, rng) for length in LENGTHS]
    in_turn = (letters for turn in zip_longest(*pools) for letters in turn if letters)
    wanted = (letters for letters in in_turn if is_held_out(letters) == held_out)
    for letters in islice(wanted, count):
        yield {"id": letters, "prompt": letters + ASK, "answer": sort_letters(letters)}


def _shuffled(length: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield all letters of a length in a random order."""
    digits = (f"{number:0{length}}" for number in rng.permutation(len(LETTERS) ** length).tolist())
    return (digit.translate(_LETTER_OF_DIGIT) for digit in digits)


def _misses_one(letters: str, answer: str) -> bool:
    given, kept = Counter(letters), Counter(answer)
    return kept <= given and (given - kept).total() == 1
