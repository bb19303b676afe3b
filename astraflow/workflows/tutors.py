"""Tutors: write the pairs on which a small model is warmed up before it is trained."""

from dataclasses import dataclass
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
