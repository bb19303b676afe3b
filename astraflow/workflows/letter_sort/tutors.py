"""Tutors: a sloppy one for sorting, one for trying again, a judge's, and one for both roles."""

from typing import Any

import numpy as np
from pydantic import Field

from astraflow.config.recipe import Strict
from astraflow.workflows.letter_sort.task import (
    ASK,
    LETTERS,
    draw_training_letters,
    sort_letters,
)
from astraflow.workflows.tiny_models import tiny_llama_config, tiny_moe_config
from astraflow.workflows.tutors import Pair

AGAIN = "!"
IS_IT_RIGHT = "?"
YES, NO = "y", "n"
# Tries before the one that the retry tutor shows.
_MAX_EARLIER_TRIES = 2


class SloppyOptions(Strict):
    """Of the tutors that answer."""

    experts: int = Field(0, ge=0)
    """Experts of every layer of the model, of which a token takes two; 0: it is dense."""
    accuracy: float = Field(0.3, ge=0, le=1)
    """Share of answers that are meant to be right."""


class SortTutor:
    """Sorts, but is right three times in ten; else descending, a copy, or a letter lost."""

    Options = SloppyOptions
    alphabet = LETTERS + ASK

    def __init__(self, options: SloppyOptions) -> None:
        self._accuracy, self._experts = options.accuracy, options.experts

    def pair(self, rng: np.random.Generator) -> Pair:
        """Return a prompt and an answer that is often wrong."""
        letters = draw_training_letters(rng)
        return Pair(prompt=letters + ASK, completion=sloppy_answer(letters, self._accuracy, rng))

    def model_config(self) -> dict[str, Any]:
        """Return the model's `config.json`."""
        return tiny_config(self.alphabet, experts=self._experts)


class RetryTutor:
    """Is asked again after a wrong answer, and is no better then."""

    Options = SloppyOptions
    alphabet = LETTERS + ASK + AGAIN

    def __init__(self, options: SloppyOptions) -> None:
        self._accuracy, self._experts = options.accuracy, options.experts

    def pair(self, rng: np.random.Generator) -> Pair:
        """Return a prompt with up to two wrong tries in it, and another answer."""
        letters = draw_training_letters(rng)
        tries = int(rng.integers(0, _MAX_EARLIER_TRIES + 1))
        earlier = "".join(f"{wrong_answer(letters, rng)}<eos>{AGAIN}" for _ in range(tries))
        answer = sloppy_answer(letters, self._accuracy, rng)
        return Pair(prompt=letters + ASK + earlier, completion=answer)

    def model_config(self) -> dict[str, Any]:
        """Return the model's `config.json`."""
        return tiny_config(self.alphabet, experts=self._experts)


class VerifierTutor:
    """Says whether an answer is right, and knows it; half of what it shows is right."""

    class Options(Strict):
        """How hard the wrong answers are."""

        near_miss_share: float = Field(0.5, ge=0, le=1)
        """Share of wrong answers that are one slip away from the right one; the rest is
        what a sloppy tutor gets wrong."""

    alphabet = LETTERS + ASK + IS_IT_RIGHT + YES + NO

    def __init__(self, options: Options) -> None:
        self._near_miss_share = options.near_miss_share

    def pair(self, rng: np.random.Generator) -> Pair:
        """Return a prompt with an answer, and the verdict."""
        letters = draw_training_letters(rng)
        right = sort_letters(letters)
        answer = right
        if rng.random() < 0.5:
            is_near = rng.random() < self._near_miss_share
            answer = near_miss(right, rng) if is_near else wrong_answer(letters, rng)
        return Pair(
            prompt=letters + ASK + answer + IS_IT_RIGHT, completion=YES if answer == right else NO
        )

    def model_config(self) -> dict[str, Any]:
        """Return the model's `config.json`."""
        return tiny_llama_config(self.alphabet)


class PairTutor:
    """Sorts sloppily half the time, and judges answers the other half: one model for both."""

    class Options(SloppyOptions, VerifierTutor.Options):
        """Of both."""

    alphabet = VerifierTutor.alphabet

    def __init__(self, options: Options) -> None:
        self._tutors = SortTutor(options), VerifierTutor(options)
        self._experts = options.experts

    def pair(self, rng: np.random.Generator) -> Pair:
        """Return what one of the two writes."""
        return self._tutors[int(rng.integers(2))].pair(rng)

    def model_config(self) -> dict[str, Any]:
        """Return the model's `config.json`."""
        return tiny_config(self.alphabet, experts=self._experts)


def tiny_config(alphabet: str, *, experts: int) -> dict[str, Any]:
    """Return the config of a dense model, or of one with so many experts."""
    return tiny_moe_config(alphabet, experts) if experts else tiny_llama_config(alphabet)


def sloppy_answer(letters: str, accuracy: float, rng: np.random.Generator) -> str:
    """Return the right answer with a probability of `accuracy`, else a wrong one."""
    return sort_letters(letters) if rng.random() < accuracy else wrong_answer(letters, rng)


def wrong_answer(letters: str, rng: np.random.Generator) -> str:
    """Return a descending answer, a copy, or one with a letter lost, each as likely.

    Letters that are in order already, or all alike, can make the first two right.
    """
    right = sort_letters(letters)
    kind = int(rng.integers(3))
    if kind == 0:
        return right[::-1]
    if kind == 1:
        return letters
    lost = int(rng.integers(len(right)))
    return right[:lost] + right[lost + 1 :]


def near_miss(right: str, rng: np.random.Generator) -> str:
    """Return an answer one slip away: two neighbours swapped, or a letter changed, lost or doubled.

    Swapping equal neighbours leaves it right.
    """
    kind, at = int(rng.integers(4)), int(rng.integers(len(right)))
    if kind == 0:
        at = min(at, len(right) - 2)
        return right[:at] + right[at + 1] + right[at] + right[at + 2 :]
    if kind == 1:
        return right[:at] + LETTERS[int(rng.integers(len(LETTERS)))] + right[at + 1 :]
    if kind == 2:
        return right[:at] + right[at + 1 :]
    return right[: at + 1] + right[at:]
