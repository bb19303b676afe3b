"""A small Llama with random weights and a tokenizer of its own, made for demonstrations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from astraflow.config.recipe import Tiny
from astraflow.workflows.agents.template import ChatTemplate

_PAD, _START, _END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_tokenizer(directory: Path, settings: Tiny, rows: Sequence[Mapping[str, Any]]) -> int:
    """Write a tokenizer of byte pairs, and a ChatML template; return how many tokens it has.

    Args:
        directory: Where the files go.
        settings: Of the recipe.
        rows: Demonstrations; their texts say which pairs become tokens.
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
    """Return the `config.json` of the model."""
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
