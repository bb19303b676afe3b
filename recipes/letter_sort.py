"""Letter sort: `dbca>` asks for `abcd`. A model of 0.24 M parameters learns it on a laptop.

Three to six letters out of a to j, repeats allowed. A tutor that is right three times in ten
warms a model up, so that it can sort but seldom does: what is left is for the reward. Run as a
program it writes `letter_sort/train.jsonl` and `held_out.jsonl`, the same ones every time.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from astraflow.config.recipe import Strict
from astraflow.core.tasks import Prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.compare import answer_of
from astraflow.workflows.tutors import BOS_ID, EOS_ID, PAD_ID, Pair, vocabulary

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


class LetterSort:
    """1 for the sorted letters, else 0; the parts say which kind of answer it was."""

    class Options(Strict):
        """What the prompt is made of."""

        field: str = "prompt"
        """Field with the letters; the `>` behind them is left out."""

    def __init__(self, options: Options) -> None:
        self._field = options.field

    def __call__(self, prompt: Prompt, text: str) -> Score:
        """Score one answer."""
        kind = kind_of(self._letters(prompt), text)
        return Score(
            reward=float(kind is Answer.RIGHT),
            parts={answer.value: float(answer is kind) for answer in Answer},
        )

    def gold(self, prompt: Prompt) -> str:
        """Return the right answer."""
        return sort_letters(self._letters(prompt))

    def _letters(self, prompt: Prompt) -> str:
        return str(answer_of(prompt, self._field)).rstrip(ASK)


_EXPERTS_PER_TOKEN = 2


def tiny_llama_config(alphabet: str, *, max_position_embeddings: int = 64) -> dict[str, Any]:
    """Return a Hugging Face `config.json`.

    The head size is 32 because CPU attention kernels of inference servers know 32, 64, 80,
    96 and up, and fail at their first request with others.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary(alphabet)),
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def tiny_moe_config(alphabet: str, expert_count: int) -> dict[str, Any]:
    """Return the config of the same model with experts in place of its wide layers.

    A token goes through two experts, which together are as wide as the dense model.
    """
    dense = tiny_llama_config(alphabet)
    return {
        **dense,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": expert_count,
        "num_experts_per_tok": _EXPERTS_PER_TOKEN,
        "moe_intermediate_size": dense["intermediate_size"] // _EXPERTS_PER_TOKEN,
        "norm_topk_prob": True,
    }


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


class RetryTutor(SortTutor):
    """Is asked again after a wrong answer, and is no better then."""

    alphabet = LETTERS + ASK + AGAIN

    def pair(self, rng: np.random.Generator) -> Pair:
        """Return a prompt with up to two wrong tries in it, and another answer."""
        letters = draw_training_letters(rng)
        tries = int(rng.integers(0, _MAX_EARLIER_TRIES + 1))
        earlier = "".join(f"{wrong_answer(letters, rng)}<eos>{AGAIN}" for _ in range(tries))
        answer = sloppy_answer(letters, self._accuracy, rng)
        return Pair(prompt=letters + ASK + earlier, completion=answer)


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


def write_prompts(folder: Path) -> None:
    """Write the data sets of the recipes."""
    for name, count in {"train": 4096, "held_out": 2048}.items():
        rows = prompt_rows(count, held_out=name == "held_out", seed=0)
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_prompts(Path(__file__).parent / "letter_sort")
