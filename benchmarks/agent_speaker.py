"""A small model that says what it is told to, and a tape of what its engine sampled.

The model is a Llama whose layers add nothing: each token alone says which tokens may follow, with
which probability. The pieces that it says are tokens that encoding never makes of a text, so
whatever is encoded again on its way to a trainer differs from what was sampled.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.core.rollouts import Trajectory, VersionSpan
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.protocol import Generation, Watch

END = "<|im_end|>"
SPECIAL = ("<|pad|>", "<|im_start|>", END)
# Likely enough that nothing else is ever drawn, and not so likely that its logarithm is 0.
_SURE = 22.0
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

TEMPLATE = """
{%- set ns = namespace(said=0, about='', go=none) %}
{%- for t in tools or [] %}{{ t | tojson }}
{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{% set ns.said = ns.said + 1 %}
    {%- elif ns.said == 0 %}{% set ns.about = ns.about + m.content %}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content }}
    {%- for c in m.tool_calls or [] %}
        {{- '<tool_call>' }}{{ c.function | tojson }}{{ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for needle, first, count in script %}
    {%- if ns.go is none and needle in ns.about %}
        {%- set ns.go = first + [ns.said, count - 1] | min %}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n<|go' ~ ns.go ~ '|>' }}"""
"""Its last token says which answer of which line of the script is next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an engine was asked, and what it sampled."""

    prompt: tuple[int, ...]
    generation: Generation

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of it, as a trainer should have it."""
        return (*self.prompt, *self.generation.tokens.tolist())


class Tape:
    """An engine that keeps what it sampled; all else is that of the engine below it.

    Attributes:
        calls: In the order in which they ended.
        running: How many have not.
    """

    def __init__(self, engine: EmbeddedEngine, *, is_renewed: bool = False) -> None:
        """Begin.

        Args:
            engine: Of the policy.
            is_renewed: Have each call sampled by a new version, of the same weights.
        """
        self.calls: list[Call] = []
        self.running = 0
        self._engine = engine
        self._is_renewed = is_renewed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Sample one completion."""
        if self._is_renewed:
            await self._engine.load_directory((self._engine.version or 0) + 1)
        self.running += 1
        try:
            made = await self._engine.generate(prompt, sampling, version=version, watch=watch)
        finally:
            self.running -= 1
        self.calls.append(Call(prompt=tuple(prompt), generation=made))
        return made


def differences(
    calls: Sequence[Call], trajectories: Sequence[Trajectory], *, is_trained: bool = True
) -> list[str]:
    """Return how what a trainer gets differs from what was sampled, a line each.

    Every token that the policy drew itself is trained on once, behind the very tokens that it was
    drawn after, with its log-probability and its version; no other token is trained on.

    Args:
        calls: Of one episode.
        trajectories: Of the same.
        is_trained: False: what a grammar drew counts like the rest.
    """
    free = [trajectory.sampled_mask.copy() for trajectory in trajectories]
    wrong: list[str] = []
    for number, call in enumerate(calls):
        made = call.generation
        own = np.ones(len(made.tokens), np.bool_)
        own = ~made.constrained if is_trained and made.constrained is not None else own
        if not own.any():
            continue
        found = [
            (len(_faults(call, own, trajectory)), place)
            for place, trajectory in enumerate(trajectories)
            if _holds(call, own, trajectory, free[place])
        ]
        if not found:
            wrong.append(f"call {number}: its {own.sum()} tokens are not trained on as sampled")
            continue
        _, place = min(found)
        wrong += [f"call {number}: {fault}" for fault in _faults(call, own, trajectories[place])]
        free[place][len(call.prompt) : len(call.tokens)] = False
    for place, left in enumerate(free):
        if left.any():
            wrong.append(f"trajectory {place}: {left.sum()} tokens are trained on, none was drawn")
    return wrong


def _holds(call: Call, own: np.ndarray, trajectory: Trajectory, free: np.ndarray) -> bool:
    start, end = len(call.prompt), len(call.tokens)
    return np.array_equal(trajectory.tokens[:end], call.tokens) and np.array_equal(
        free[start:end], own
    )


def _faults(call: Call, own: np.ndarray, trajectory: Trajectory) -> list[str]:
    start, end = len(call.prompt), len(call.tokens)
    mask = trajectory.sampled_mask
    versions = np.zeros(len(mask), np.int64)
    versions[mask] = _versions(trajectory.version_spans)
    made = call.generation
    pairs = {
        "log-probabilities": (trajectory.logprobs[start:end][own], made.logprobs[own]),
        "versions": (versions[start:end][own], _versions(made.version_spans)[own]),
    }
    return [
        f"other {name}" for name, (told, drawn) in pairs.items() if not np.array_equal(told, drawn)
    ]


def _versions(spans: Sequence[VersionSpan]) -> np.ndarray:
    return np.repeat([span.version for span in spans], [span.length for span in spans])


@dataclass(slots=True, kw_only=True)
class Speaker:
    """What the model says.

    Attributes:
        next_of: By the text of a token, or by its bytes, its followers with their weights; a token
            without any is followed by the end.
        variables: Of TEMPLATE.
    """

    next_of: dict[Any, dict[Any, float]] = field(default_factory=dict[Any, dict[Any, float]])
    variables: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(
        cls,
        script: Mapping[str, Sequence[str]],
        *,
        after: Mapping[str, Sequence[str]] | None = None,
        seed: int = 0,
    ) -> "Speaker":
        """Say the lines of a script, each cut into pieces in two ways.

        Args:
            script: By a text that the beginning of a chat has, what is said in it, one answer after
                the other; the last one again and again. The first text that is found counts.
            after: By the text of a token, which one of some texts follows it: for answers whose
                beginning is not the model's to say.
            seed: Of the cuts.
        """
        made, dice, count, lines = cls(), random.Random(seed), 0, list[Any]()
        for needle, answers in script.items():
            lines.append((needle, count, len(answers)))
            for answer in answers:
                made._add(f"<|go{count}|>", answer, dice)
                count += 1
        for token, texts in (after or {}).items():
            for text in texts:
                made._add(token, text, dice)
        made.variables = {"script": lines}
        return made

    def _add(self, start: str, text: str, dice: random.Random) -> None:
        """Let a text follow a token."""
        for _ in range(2):
            way = self._cut(text, dice)
            for token, following in zip([start, *way], [*way, END], strict=True):
                self.next_of.setdefault(token, {})[following] = 1.0

    def _cut(self, text: str, dice: random.Random) -> list[str]:
        """Cut a text into pieces none of which was used yet; in one where there is no such cut."""
        for _ in range(100):
            count = min(len(text) - 1, dice.randint(1, 4))
            at = [0, *sorted(dice.sample(range(1, len(text)), count)), len(text)]
            pieces = [text[a:b] for a, b in pairwise(at)]
            if len(set(pieces)) == len(pieces) and not self.next_of.keys() & set(pieces):
                return pieces
        return [text]

    def write(self, folder: Path, *, max_context: int) -> None:
        """Write it as a Hugging Face directory."""
        folder.mkdir(exist_ok=True)
        vocab = self._write_tokenizer(folder)
        ids = {token: vocab[_written(token)] for token in self.next_of}
        width = -(-(len(ids) + 1) // 32) * 32
        config = LlamaConfig(
            vocab_size=len(vocab),
            hidden_size=width,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=max_context,
            bos_token_id=None,
            pad_token_id=vocab["<|pad|>"],
            eos_token_id=vocab[END],
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.model.embed_tokens.weight.zero_()
            model.model.embed_tokens.weight[:, 0] = 1.0
            model.model.layers[0].self_attn.o_proj.weight.zero_()
            model.model.layers[0].mlp.down_proj.weight.zero_()
            head = model.lm_head.weight.zero_()
            scale = width**0.5  # that the norm gives to what is one alone
            head[vocab[END], 0] = _SURE / scale
            for place, (token, number) in enumerate(ids.items(), 1):
                model.model.embed_tokens.weight[number] = torch.eye(width)[place]
                for following, weight in self.next_of[token].items():
                    score = (_SURE + float(np.log(weight))) / scale
                    head[vocab[_written(following)], place] = score
        model.save_pretrained(folder)

    def _write_tokenizer(self, folder: Path) -> dict[str, int]:
        """Write a byte-level BPE, with the pieces as tokens that no merge makes."""
        made: Any = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        docs = (Path(__file__).parents[1] / "docs").glob("*.md")
        trainer = trainers.BpeTrainer(
            vocab_size=1200,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train([str(path) for path in sorted(docs)[:4]], trainer)
        given = json.loads(made.to_str())["model"]
        starts = [token for token in self.next_of if str(token).startswith("<|go")]
        special = [*SPECIAL, *starts]
        vocab = {token: number for number, token in enumerate([*special, *given["vocab"]])}
        for token in [*self.next_of, *(each for some in self.next_of.values() for each in some)]:
            vocab.setdefault(_written(token), len(vocab))
        merges = [tuple(pair) for pair in given["merges"]]
        made.model = models.BPE(vocab=vocab, merges=merges)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(special)
        made.save(str(folder / "tokenizer.json"))
        return vocab


def _written(token: str | bytes) -> str:
    """Return a token as a byte-level vocabulary has it."""
    if isinstance(token, bytes):  # what is no whole character: the letters of its bytes
        return "".join(_letter(byte) for byte in token)
    if token.startswith("<|"):
        return token
    return "".join(piece for piece, _ in _BYTE_LEVEL.pre_tokenize_str(token))


def _letter(byte: int) -> str:
    """Return how a byte-level vocabulary writes a byte: as itself, or beyond all bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [each for each in range(256) if each not in shown]
    return chr(byte if byte in shown else 256 + hidden.index(byte))
