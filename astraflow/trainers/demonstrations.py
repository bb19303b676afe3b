"""Demonstrations: chats and texts as tokens of a model, and a small model made for them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from astraflow.config.recipe import Tiny
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.tokenizer import load_tokenizer
from astraflow.workflows.agents.template import PLAIN, ChatTemplate, load_template
from astraflow.workflows.data_sets import JsonLines


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedRow:
    """One sequence.

    Attributes:
        tokens: i64[L].
        learned: bool[L], where the loss applies; the first token has nothing that predicts it.
    """

    tokens: np.ndarray
    learned: np.ndarray


def read_demonstrations(path: Path) -> list[Mapping[str, Any]]:
    """Read a JSONL file of chats, of prompts with completions, or of both.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot be read, is empty, or a row is neither.
    """
    rows = list(JsonLines(path))
    if not rows:
        raise AstraflowError(Reason.INVALID_FIELD, f"{path} has no demonstrations")
    for number, row in enumerate(rows, start=1):
        what = _what_is_wrong(row)
        if what:
            raise AstraflowError(Reason.INVALID_FIELD, f"{path}: row {number} {what}")
    return rows


def _what_is_wrong(row: Mapping[str, Any]) -> str:
    if "messages" not in row:
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            return ""
        return (
            f"has {', '.join(row) or 'nothing'}; a demonstration has 'messages', or the texts "
            "'prompt' and 'completion'"
        )
    if not isinstance(row["messages"], list):
        return "has 'messages' that are no list"
    messages = cast("list[Any]", row["messages"])
    roles = [cast("Any", each).get("role") for each in messages if isinstance(each, dict)]
    if len(roles) < len(messages) or not all(isinstance(role, str) for role in roles):
        return "has 'messages' that are not all objects with a 'role'"
    return "" if "assistant" in roles else "has no message of the assistant to learn from"


def tokenize_demonstrations(
    rows: Sequence[Mapping[str, Any]],
    directory: Path,
    *,
    max_length: int,
    report: Callable[[str], None] = print,
) -> list[SupervisedRow]:
    """Turn demonstrations into tokens of a model; report how many are left out as too long.

    Raises:
        AstraflowError: INVALID_FIELD for messages that the model's template refuses, or when it
            has none; when it names no end token; and when nothing is left.
    """
    coder = _Coder(directory)
    made = [each for number, row in enumerate(rows, start=1) for each in coder.rows(row, number)]
    kept = [each for each in made if len(each.tokens) <= max_length]
    if not kept:
        shortest = min(len(each.tokens) for each in made)
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"every demonstration is longer than max_length, {max_length} tokens; the shortest "
            f"has {shortest}",
        )
    if len(kept) < len(made):
        report(
            f"{len(made) - len(kept)} of {len(made)} rows are left out: they have more than "
            f"max_length, {max_length} tokens"
        )
    return kept


class _Coder:
    """What a model makes of texts and chats."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = load_tokenizer(directory)
        self._template: ChatTemplate = load_template(directory)
        ids = self._tokenizer.special_ids.eos
        if not ids:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{directory} names no end token; give its config.json an eos_token_id",
            )
        self._ends = {self._tokenizer.text_of(each): each for each in sorted(ids)}

    def rows(self, row: Mapping[str, Any], number: int) -> Iterator[SupervisedRow]:
        if "messages" not in row:
            prompt = self._encode(row["prompt"], is_start=True)
            end = next(iter(self._ends.values()))
            yield _row([(prompt, False), ([*self._encode(row["completion"]), end], True)])
            return
        try:
            yield from self._chat(row["messages"], row.get("tools") or ())
        except AstraflowError as error:
            raise AstraflowError(error.reason, f"demonstration {number}: {error.message}") from None

    def _chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
    ) -> Iterator[SupervisedRow]:
        """Yield a chat as one row; or as several, where the template rewrites what was said.

        Text becomes tokens piece by piece, as it does when the model is sampled from: what it
        says is encoded by itself, with the end token after it.
        """
        if self._template.source == PLAIN:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{self._directory} has no chat template for 'messages'; give rows of 'prompt' "
                "and 'completion', or put a chat_template.jinja into it",
            )
        parts: list[tuple[Sequence[int], bool]] = []
        text = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._template.render(cast("Any", messages[:index]), tools)
            if not prompt.startswith(text):
                yield _row(parts)
                parts, text = [], ""
            said = self._answer_text(messages[: index + 1], tools, prompt)
            parts.append((self._encode(prompt[len(text) :]), False))
            parts.append((self._encode(said), True))
            text = prompt + said
        yield _row(parts)

    def _answer_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompt: str
    ) -> str:
        """Return the text of the last message, with the end token that follows it."""
        whole = self._template.render(cast("Any", messages), tools)
        rest = whole.removeprefix(prompt)
        ends = [(rest.index(end), end) for end in self._ends if end in rest]
        if len(rest) == len(whole) or not ends:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the chat template does not show message {len(messages)} as the assistant would "
                f"say it: after its prompt, and before an end token ({', '.join(self._ends)})",
            )
        at, end = min(ends)
        return rest[:at] + end

    def _encode(self, text: str, *, is_start: bool = False) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=is_start)


def _row(parts: Sequence[tuple[Sequence[int], bool]]) -> SupervisedRow:
    learned = np.concatenate([np.full(len(ids), flag) for ids, flag in parts])
    learned[:1] = False
    return SupervisedRow(
        tokens=np.concatenate([np.asarray(ids, np.int64) for ids, _ in parts]), learned=learned
    )


_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_tokenizer(directory: Path, settings: Tiny, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write a tokenizer of byte pairs, and a ChatML template; return how many tokens it has.

    The texts of demonstrations say which pairs become tokens.
    """
    import tokenizers  # noqa: PLC0415 - comes with torch's extra
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    made: Any = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[_PAD, _START, _END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(map(_text_of, rows), trainer)
    made.save(str(directory / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _PAD,
        "bos_token": _START,
        "eos_token": _END,
        "model_max_length": settings.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(made.get_vocab_size())


def tiny_config(settings: Tiny, *, vocabulary_size: int) -> dict[str, Any]:
    heads = settings.hidden_size // 32
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 3 * settings.hidden_size,
        "num_hidden_layers": settings.layer_count,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "max_position_embeddings": settings.context,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _text_of(row: Mapping[str, Any]) -> str:
    if "messages" not in row:
        return row["prompt"] + row["completion"]
    text = ChatTemplate(CHATML).render(row["messages"])
    # They are whole tokens as they are, and no part of others.
    return text.replace(_START, "").replace(_END, "")
