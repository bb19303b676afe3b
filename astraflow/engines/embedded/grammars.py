"""Grammars: which tokens may come next, so that a completion is what was asked for."""

import json
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from astraflow.config.extras import install
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Grammar
from astraflow.engines.tokenizer import FastTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled ones that are kept: an agent asks for few, again and again.
_KEPT_COUNT = 64


class Guide:
    """Follows one completion through its grammar; belongs to one thread at a time.

    Attributes:
        constrained: For each token so far, whether the grammar changed its draw.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self.constrained: list[bool] = []
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end token may come, or nothing at all."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why it cannot go on; empty: it can, or is over."""
        return self._matcher.get_error()

    def allowed(self) -> np.ndarray:
        """Return bool[vocabulary], which tokens may come next; all where it cannot go on."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return allowed if allowed.any() else np.ones(self._vocab_size, np.bool_)

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)


class _Plain:
    """Tokens that are texts, one after the other, as llguidance reads those of its own making."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        special = tokenizer.special_ids
        if not special.eos:
            raise ValueError("there is no end token")
        self.eos_token_id = min(special.eos)
        self.bos_token_id = None
        self.special_token_ids = sorted(special.eos | special.never_sampled)
        self.tokens = [tokenizer.decode([token]).encode() for token in range(tokenizer.vocab_size)]

    def __call__(self, text: str) -> list[int]:
        """Return the first tokens of a text; nothing that is sampled depends on it."""
        letters = [letter.encode() for letter in text]
        return [self.tokens.index(letter) for letter in letters if letter in self.tokens]


class Grammars:
    """Makes guides for the tokens of a model."""

    def __init__(self, tokenizer: FastTokenizer, *, vocab_size: int) -> None:
        """Load no library; the first grammar does."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._words: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=_KEPT_COUNT)(self._compile)

    def guide(self, grammar: Grammar) -> Guide:
        """Return a guide at the start; takes up to a second the first time, so not on a loop.

        Raises:
            AstraflowError: CAPABILITY_MISSING without the library; INVALID_FIELD for a schema that
                it cannot follow, or a vocabulary that cannot spell JSON.
        """
        with self._lock:
            matcher = self._compiled(grammar).deep_copy()
        return Guide(matcher, self._vocab_size)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        try:
            from llguidance import LLMatcher  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING,
                "sampling by a grammar (response_format, tool_choice) needs llguidance: "
                f"{install('grammar')}, on the nodes",
                metadata={"field": "response_format"},
            ) from error
        matcher = LLMatcher(self._vocabulary(), lark_of(grammar), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise cannot_follow(matcher.get_error())
        return matcher

    def _vocabulary(self) -> "LLTokenizer":
        if self._words is None:
            from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - an extra

            written = self._tokenizer.to_json()
            decoder: dict[str, Any] = json.loads(written)["decoder"] or {}
            eos = sorted(self._tokenizer.special_ids.eos)
            options: dict[str, Any] = {"n_vocab": self._vocab_size, "eos_token": eos or None}
            try:
                words = (
                    TokenizerWrapper(_Plain(self._tokenizer))
                    if decoder.get("type") == "Fuse"
                    else written
                )
                self._words = LLTokenizer(words, **options)
            except Exception as error:  # the Rust library raises nothing narrower
                raise cannot_follow(f"the model's tokens do not fit: {error}") from error
        return self._words


def lark_of(grammar: Grammar) -> str:
    ways: list[str] = []
    if grammar.answer is not None:
        ways.append(f"%json {grammar.answer}")
    if grammar.call is not None:
        ways.append(f'"<tool_call>\\n" %json {grammar.call} "\\n</tool_call>"')
    return f"start: {' | '.join(ways)}"


def cannot_follow(why: str) -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD,
        f"the grammar that was asked for cannot be followed: {why[:300]}",
        metadata={"field": "response_format"},
    )
