"""Tutors write the pairs on which a small model is warmed up, over a tokenizer of characters."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One example; the loss applies to the completion and the end token after it.

    Attributes:
        prompt: May spell out special tokens, such as `<eos>`.
        completion: Without its end token.
    """

    prompt: str
    completion: str


class Tutor(Protocol):
    """Writes examples for a model of its own choice."""

    @property
    def alphabet(self) -> str:
        """Characters that are tokens, beside `<pad>`, `<bos>` and `<eos>`."""
        ...

    def pair(self, rng: np.random.Generator) -> Pair:
        """Return one example."""
        ...

    def model_config(self) -> dict[str, Any]:
        """Return the model's `config.json`."""
        ...


PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


def vocabulary(alphabet: str) -> dict[str, int]:
    """Return the id of every token: the special ones, then the characters in their order.

    Raises:
        ValueError: A character comes twice.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"a character comes twice in '{alphabet}'")
    return {token: number for number, token in enumerate((PAD, BOS, EOS, *alphabet))}


def write_tokenizer(directory: Path, alphabet: str) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`.

    A text that is encoded with special tokens starts with `<bos>`; a character outside the
    alphabet is an error. Needs tokenizers (extra `torch`).
    """
    tokenizer = character_tokenizer(alphabet)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def character_tokenizer(alphabet: str) -> Any:
    """Return the `tokenizers.Tokenizer` of an alphabet. Needs tokenizers (extra `torch`)."""
    import tokenizers  # noqa: PLC0415 - an extra
    from tokenizers import decoders, models, pre_tokenizers, processors  # noqa: PLC0415

    made: Any = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary(alphabet)))
    one_character = tokenizers.Regex(r"[\s\S]")
    made.pre_tokenizer = pre_tokenizers.Split(one_character, behavior="isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    made.add_special_tokens([PAD, BOS, EOS])
    return made
