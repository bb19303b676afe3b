"""Tokenizers: text to ids and back, special ids, and texts that end a completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from astraflow.config.run_dir import read_json
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.texts import whole_text


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    """Token ids that an engine treats in its own way.

    Attributes:
        eos: End a generation.
        never_sampled: Padding and beginning of text, unless they are end tokens as well.
    """

    eos: frozenset[int]
    never_sampled: frozenset[int]

    def below(self, vocab_size: int) -> "SpecialIds":
        """Return those that a model of so many ids knows; files may name others."""
        known = frozenset(range(vocab_size))
        return SpecialIds(eos=self.eos & known, never_sampled=self.never_sampled & known)


class FastTokenizer:
    """The tokenizer of a Hugging Face directory, read from `tokenizer.json`.

    Attributes:
        special_ids: Ids that end, begin or pad a text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: SpecialIds) -> None:
        self._tokenizer = tokenizer
        self.special_ids = special_ids
        self._silent = special_ids.eos | special_ids.never_sampled

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def text_of(self, token: int) -> str:
        """Return what a template writes for a token, which may be a special one."""
        return str(self._tokenizer.id_to_token(token))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Sequence[int]:
        """Return the ids of a text; True adds what the tokenizer puts at its ends (bos).

        Half of a surrogate pair, as of what was cut within an emoji, is the replacement character.

        Raises:
            AstraflowError: INVALID_FIELD for characters that it has no token for.
        """
        text = whole_text(text)
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the Rust library raises nothing narrower
            unknown = [char for char in dict.fromkeys(text) if not self._has_tokens_for(char)]
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the model's tokenizer has no token for {unknown[:16]} in {text[:80]!r}: "
                f"write it with what the model knows, or train another model ({error})",
            ) from error

    def _has_tokens_for(self, text: str) -> bool:
        try:
            self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - see encode
            return False
        return True

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        shown = [int(token) for token in tokens if token not in self._silent]
        return self._tokenizer.decode(shown, skip_special_tokens=True)


def load_tokenizer(model_dir: Path) -> FastTokenizer:
    """Read the tokenizer of a Hugging Face directory.

    Raises:
        AstraflowError: INVALID_FIELD when there is no readable `tokenizer.json`.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{path} does not exist; save the model's fast tokenizer beside its config.json",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises nothing narrower
        raise AstraflowError(Reason.INVALID_FIELD, f"{path} is no tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return FastTokenizer(tokenizer, read_special_ids(model_dir, tokenizer))


def find_tokenizer(model_dir: Path) -> tuple[FastTokenizer | None, SpecialIds]:
    """Return the tokenizer of a Hugging Face directory, if it has one, and its special ids."""
    if not (model_dir / "tokenizer.json").is_file():
        return None, read_special_ids(model_dir)
    tokenizer = load_tokenizer(model_dir)
    return tokenizer, tokenizer.special_ids


def read_special_ids(model_dir: Path, tokenizer: tokenizers.Tokenizer | None = None) -> SpecialIds:
    """Collect the special ids that the files of a Hugging Face directory name.

    `config.json` and `generation_config.json` give ids, `tokenizer_config.json` gives texts.
    """
    files = [read_json(model_dir / name) for name in ("config.json", "generation_config.json")]
    texts = read_json(model_dir / "tokenizer_config.json")

    def collect(kind: str) -> frozenset[int]:
        ids = {token for file in files for token in _as_ids(file.get(f"{kind}_token_id"))}
        text = _as_text(texts.get(f"{kind}_token"))
        known = tokenizer.token_to_id(text) if tokenizer is not None and text else None
        return frozenset(ids if known is None else ids | {known})

    eos = collect("eos")
    return SpecialIds(eos=eos, never_sampled=(collect("pad") | collect("bos")) - eos)


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [token for token in (value if isinstance(value, list) else [value]) if token >= 0]


def _as_text(value: str | dict[str, Any] | None) -> str | None:
    return value["content"] if isinstance(value, dict) else value


# A multi-byte character may be spread over so many tokens beside those of the stop string.
_WINDOW_SLACK = 4


class StopTexts:
    """Some texts that end a completion of at least so many tokens.

    Attributes:
        span: Tokens from the end in which a text lies whole.
    """

    def __init__(
        self, tokenizer: FastTokenizer, texts: Sequence[str], *, min_new_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._min = min_new_tokens
        self.span = max((len(text.encode()) for text in texts), default=0) + _WINDOW_SLACK

    def first_end(self, tokens: Sequence[int], start: int = 0) -> int | None:
        """Return the length of the shortest completion that ends so, longer than `start`."""
        lengths = range(max(start + 1, self._min), len(tokens) + 1)
        return next((n for n in lengths if self.ends(tokens[max(0, n - self.span) : n])), None)

    def ends(self, window: Sequence[int]) -> bool:
        """Return whether the last of some tokens completes one of the texts."""
        text = self._tokenizer.decode(window)
        # The last token may complete a character; the bytes of it before are no text yet.
        known = len(self._tokenizer.decode(window[:-1]).rstrip("\ufffd"))
        return any(text.find(stop, max(0, known - len(stop) + 1)) >= 0 for stop in self._texts)
