"""Supervised steps on pairs of a tutor: from random weights to a Hugging Face directory."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from astraflow.config.recipe import WarmUp
from astraflow.trainers import tensors
from astraflow.trainers.causal_model import hide_progress_bars
from astraflow.trainers.model_files import save_model
from astraflow.trainers.tensors import backward, seed_everything, to_tensor
from astraflow.workflows.tokenizer_files import EOS_ID, write_tokenizer
from astraflow.workflows.tutors import Pair, Tutor

_IGNORED = -100
# Share of the peak that the learning rate ends at, and of the steps in which it rises.
_LAST_RATE_SHARE = 0.1
_RISE_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedBatch:
    """Pairs, padded on the right.

    Attributes:
        tokens: i64[n, L].
        labels: i64[n, L], the token itself where the loss applies, else -100.
    """

    tokens: np.ndarray
    labels: np.ndarray


def make_model(settings: WarmUp, tutor: Tutor, *, seed: int, target: Path) -> None:
    """Make a model directory: tokenizer, config and weights; there whole or not at all."""
    draft = target.with_name(f".{target.name}.{os.getpid()}.tokenizer")
    try:
        write_tokenizer(draft, tutor.alphabet)
        module = new_model(tutor.model_config(), seed=seed)
        train_on_pairs(
            module, batches_of(settings, tutor, tokenizer_dir=draft, seed=seed), settings
        )
        save_model(module, target, companions_of=draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def new_model(config: dict[str, Any], *, seed: int) -> nn.Module:
    """Return a model with random weights in f32, the same for the same seed."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    from astraflow.engines.making import make_causal_model  # noqa: PLC0415 - slow to import

    hide_progress_bars()
    fields = {name: value for name, value in config.items() if name != "model_type"}
    seed_everything(seed)
    made = cast("Any", AutoConfig).for_model(config["model_type"], **fields)
    return make_causal_model(made, dtype=torch.float32)


def batches_of(
    settings: WarmUp, tutor: Tutor, *, tokenizer_dir: Path, seed: int
) -> Iterator[SupervisedBatch]:
    """Yield `step_count` batches of pairs as tokens."""
    import tokenizers  # noqa: PLC0415 - comes with torch's extra

    tokenizer: Any = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    for _ in range(settings.step_count):
        yield pack_pairs(tokenizer, [tutor.pair(rng) for _ in range(settings.batch_size)])


def pack_pairs(tokenizer: Any, pairs: Sequence[Pair]) -> SupervisedBatch:
    """Turn pairs into tokens; the loss applies to completions and the end tokens after them."""
    prompts = [e.ids for e in tokenizer.encode_batch([pair.prompt for pair in pairs])]
    texts = [pair.completion for pair in pairs]
    completions = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    rows = [[*p, *c, EOS_ID] for p, c in zip(prompts, completions, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int64)
    labels = np.full_like(tokens, _IGNORED)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[index, : len(row)] = row
        labels[index, len(prompt) : len(row)] = row[len(prompt) :]
    return SupervisedBatch(tokens=tokens, labels=labels)


def train_on_pairs(module: nn.Module, batches: Iterator[SupervisedBatch], settings: WarmUp) -> None:
    """Make one AdamW step per batch; the weights after the last one stay."""
    parameters = list(module.parameters())
    adam = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step, batch in enumerate(batches, start=1):
        for group in adam.param_groups:
            group["lr"] = supervised_rate(settings, step)
        logits = cast("torch.Tensor", module(to_tensor(batch.tokens), use_cache=False).logits)
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            to_tensor(batch.labels[:, 1:].copy()).flatten(),
            ignore_index=_IGNORED,
        )
        backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        tensors.step(adam)


def supervised_rate(settings: WarmUp, step: int) -> float:
    """Return the learning rate of a step, counted from 1: up in the first tenth, then down."""
    rise = max(1.0, _RISE_SHARE * settings.step_count)
    if step <= rise:
        return settings.learning_rate * step / rise
    done = (step - rise) / max(1.0, settings.step_count - rise)
    return settings.learning_rate * (1 - (1 - _LAST_RATE_SHARE) * done)
