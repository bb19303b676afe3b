"""Chat templates with tokenizers, and a policy that samples anything at all."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from astraflow.core.rollouts import FinishReason, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.protocol import Generation
from astraflow.engines.tokenizer import FastTokenizer, SpecialIds
from astraflow.workflows.agents.template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
# How the templates here end a turn.
ENDS = {
    "chatml": "<|im_end|>",
    "headers": "<|eot|>",
    "brackets": "</s>",
    "turns": "<end_of_turn>",
    "smollm2": "<|im_end|>",
    "qwen3_like": "<|im_end|>",
}
MARKERS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|head|>", "<|/head|>")
TURNS = ("<start_of_turn>", "<end_of_turn>")


@cache
def raw_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE over a few words, with the markers of all templates."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = "the quick brown fox jumps over lazy dogs while assistants and users talk\n\n tool"
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*MARKERS, *TURNS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([words] * 4, trainer)
    return made


@cache
def tokenizer_for(template: str) -> FastTokenizer:
    raw = raw_tokenizer()
    end = raw.token_to_id(ENDS[template])
    return FastTokenizer(raw, SpecialIds(eos=frozenset({end}), never_sampled=frozenset()))


@cache
def template_of(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, variables={"bos_token": "<s>", "eos_token": "</s>"})


@dataclass
class Babbler:
    """Samples ids at random, in pieces that no tokenizer would make, and mostly ends its turn."""

    rng: Random
    end: int
    first: int = len(MARKERS) + len(TURNS)
    vocab_size: int = 330
    version: int = 3
    name: str = "babbler/1"
    max_context_token_count: int = 10**6

    def say(self, sampling: SamplingParams | None = None) -> Generation:
        rng = self.rng
        tokens = [rng.randrange(self.first, self.vocab_size) for _ in range(rng.randint(1, 12))]
        is_ended = rng.random() < 0.8
        if is_ended:
            tokens.append(self.end)
        return Generation(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array([-rng.random() for _ in tokens], np.float32),
            version_spans=(VersionSpan(version=self.version, length=len(tokens)),),
            finish_reason=FinishReason.STOP if is_ended else FinishReason.LENGTH,
        )
