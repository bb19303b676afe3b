"""Supervised steps, on pairs of a tutor or on demonstrations, to a Hugging Face directory."""

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import nn

from astraflow.config.recipe import ModelConfig, Tiny, WarmUp
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers import tensors
from astraflow.trainers.causal_model import CausalModel, hide_progress_bars, load_causal_model
from astraflow.trainers.demonstrations import (
    SupervisedRow,
    read_demonstrations,
    tiny_config,
    tokenize_demonstrations,
    write_tiny_tokenizer,
)
from astraflow.trainers.model_files import save_model
from astraflow.trainers.tensors import backward, seed_everything, to_tensor
from astraflow.workflows.tutors import EOS_ID, Pair, Tutor, write_tokenizer

Report = Callable[[str], None]

_IGNORED = -100
# Share of the peak that the learning rate ends at, and of the steps in which it rises.
_LAST_RATE_SHARE = 0.1
_RISE_SHARE = 0.1
# Padded tokens, and elements of logits (256 MiB), that one pass may have.
_PASS_TOKENS = 4096
_PASS_LOGITS = 1 << 26
# Batches whose rows are sorted by length together: padding goes, and the order stays random.
_SORTED_BATCHES = 8
# A smaller model loses more to threads that wait for each other than they do for it.
_MANY_PARAMETERS = 10_000_000
_REPORT_EVERY_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How many steps, of how many rows, at which rate."""

    step_count: int
    batch_size: int
    learning_rate: float

    @classmethod
    def of(cls, settings: WarmUp, *, row_count: int | None = None) -> "Schedule":
        """Fill in what a recipe leaves out.

        The rows are demonstrations for a model that is given; None: it starts from nothing.
        """
        is_given = row_count is not None
        batch_size = settings.batch_size or (8 if is_given else 64)
        three_passes = -(-3 * (row_count or 0) // batch_size)
        return cls(
            step_count=settings.step_count or (three_passes if is_given else 300),
            batch_size=batch_size,
            learning_rate=settings.learning_rate or (1e-4 if is_given else 2e-3),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SupervisedBatch:
    """Rows, padded on the right.

    Attributes:
        tokens: i64[n, L].
        labels: i64[n, L], the token itself where the loss applies, else -100.
    """

    tokens: np.ndarray
    labels: np.ndarray


def make_tutored(
    settings: WarmUp, tutor: Tutor, *, seed: int, target: Path, report: Report
) -> None:
    """Make a tutor's model: tokenizer, config and weights; there whole or not at all."""
    schedule = Schedule.of(settings)
    with TemporaryDirectory() as folder:
        draft = Path(folder)
        write_tokenizer(draft, tutor.alphabet)
        module = new_model(tutor.model_config(), seed=seed)
        batches = tutored_batches(schedule, tutor, tokenizer_dir=draft, seed=seed)
        train_on_batches(module, batches, schedule, report=report)
        save_model(module, target, companions_of=draft)


def make_demonstrated(
    model: ModelConfig, base: Path | None, *, seed: int, target: Path, report: Report
) -> None:
    """Make a model that has learned from demonstrations; there whole or not at all.

    It begins as the base, or as a tiny one where there is none; the seed is that of the order of
    rows, and of random weights.

    Raises:
        AstraflowError: INVALID_FIELD for demonstrations that cannot be learned from, or a loss
            that is not finite.
    """
    settings = cast("WarmUp", model.warm_up)
    demonstrations = read_demonstrations(cast("Path", settings.demonstrations))
    with TemporaryDirectory() as folder:
        draft = Path(folder)
        if base is None:
            tiny = cast("Tiny", model.tiny)
            count = write_tiny_tokenizer(draft, tiny, demonstrations)
            module = new_model(tiny_config(tiny, vocabulary_size=count), seed=seed)
            companions, max_length = draft, min(settings.max_length, tiny.context)
            module.config.save_pretrained(draft)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportCallIssue] - of transformers
        else:
            module = load_causal_model(base, device="cpu").module
            companions, max_length = base, settings.max_length
        rows = tokenize_demonstrations(
            demonstrations, companions, max_length=max_length, report=report
        )
        schedule = Schedule.of(settings, row_count=None if base is None else len(rows))
        size = sum(each.numel() for each in module.parameters())
        report(
            f"learning from {len(demonstrations)} demonstrations ({len(rows)} rows of up to "
            f"{max(len(row.tokens) for row in rows)} tokens): {schedule.step_count} steps of "
            f"{schedule.batch_size}, {size / 1e6:.1f} M parameters"
        )
        with _threads(size):
            batches = demonstrated_batches(rows, schedule, seed=seed)
            train_on_batches(module, batches, schedule, report=report)
        save_model(module, target, companions_of=companions)


def new_model(config: dict[str, Any], *, seed: int) -> nn.Module:
    """Return a model with random weights in f32, the same for the same seed."""
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    from astraflow.engines.modules import make_causal_model  # noqa: PLC0415 - slow to import

    hide_progress_bars()
    fields = {name: value for name, value in config.items() if name != "model_type"}
    seed_everything(seed)
    made = cast("Any", AutoConfig).for_model(config["model_type"], **fields)
    return make_causal_model(made, dtype=torch.float32)


def tutored_batches(
    schedule: Schedule, tutor: Tutor, *, tokenizer_dir: Path, seed: int
) -> Iterator[SupervisedBatch]:
    import tokenizers  # noqa: PLC0415 - comes with torch's extra

    tokenizer: Any = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    for _ in range(schedule.step_count):
        yield pack_pairs(tokenizer, [tutor.pair(rng) for _ in range(schedule.batch_size)])


def demonstrated_batches(
    rows: Sequence[SupervisedRow], schedule: Schedule, *, seed: int
) -> Iterator[SupervisedBatch]:
    """Yield `step_count` batches of rows, pass after pass, each in another order.

    Rows of about one length are together.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([len(row.tokens) for row in rows])
    window = schedule.batch_size * _SORTED_BATCHES
    order = np.empty(0, np.int64)
    left = schedule.step_count
    while left:
        while len(order) < window:
            order = np.concatenate([order, rng.permutation(len(rows))])
        now, order = order[:window], order[window:]
        now = now[np.argsort(lengths[now], kind="stable")]
        for at in rng.permutation(_SORTED_BATCHES)[:left].tolist():
            chosen: list[int] = now[at * schedule.batch_size :][: schedule.batch_size].tolist()
            yield pack_rows([rows[index] for index in chosen])
            left -= 1


def pack_pairs(tokenizer: Any, pairs: Sequence[Pair]) -> SupervisedBatch:
    """Turn pairs into tokens; the loss applies to completions and the end tokens after them."""
    prompts = [e.ids for e in tokenizer.encode_batch([pair.prompt for pair in pairs])]
    texts = [pair.completion for pair in pairs]
    completions = [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return pack_rows(
        [
            SupervisedRow(
                tokens=np.array([*prompt, *completion, EOS_ID], np.int64),
                learned=np.arange(len(prompt) + len(completion) + 1) >= len(prompt),
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    )


def pack_rows(rows: Sequence[SupervisedRow]) -> SupervisedBatch:
    tokens = np.zeros((len(rows), max(len(row.tokens) for row in rows)), np.int64)
    labels = np.full_like(tokens, _IGNORED)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        labels[index, : len(row.tokens)] = np.where(row.learned, row.tokens, _IGNORED)
    return SupervisedBatch(tokens=tokens, labels=labels)


def train_on_batches(
    module: nn.Module, batches: Iterator[SupervisedBatch], schedule: Schedule, *, report: Report
) -> None:
    """Make one AdamW step per batch; the weights after the last one stay.

    Raises:
        AstraflowError: INVALID_FIELD when the loss is no longer finite.
    """
    model = CausalModel(module)
    parameters = list(module.parameters())
    adam = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    started = told = time.monotonic()
    for step, batch in enumerate(batches, start=1):
        for group in adam.param_groups:
            group["lr"] = supervised_rate(schedule, step)
        loss = add_gradients(model, batch)
        if not np.isfinite(loss):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the loss of warm-up step {step} is {loss}; lower warm_up.learning_rate, which "
                f"is {schedule.learning_rate:g}",
            )
        nn.utils.clip_grad_norm_(parameters, 1.0)
        tensors.step(adam)
        now = time.monotonic()
        if step in (1, schedule.step_count) or now >= told + _REPORT_EVERY_S:
            told = now
            left = (now - started) / step * (schedule.step_count - step)
            report(f"warm-up step {step}/{schedule.step_count} loss {loss:.3f}, {left:.0f} s left")


def add_gradients(model: CausalModel, batch: SupervisedBatch) -> float:
    """Add the gradient of a batch's mean loss per learned token; return that loss.

    Logits are made where a learned token follows, and nowhere else.
    """
    count = int((batch.labels[:, 1:] != _IGNORED).sum())
    total = 0.0
    for part in _passes(batch, model.vocabulary_size):
        targets = part.labels[:, 1:]
        row, column = np.nonzero(targets != _IGNORED)
        chosen = to_tensor(row * part.tokens.shape[1] + column, model.device)
        logits = model.logits(to_tensor(part.tokens, model.device), chosen)
        learned = to_tensor(targets[row, column], model.device)
        # `cross_entropy` on a CPU is off by 1e-5 over 49,152 tokens in f32; this by 1e-6.
        said = logits.gather(1, learned[:, None])[:, 0]
        loss = (logits.logsumexp(1) - said).sum() / count
        backward(loss)
        total += float(loss.detach())
    return total


def _passes(batch: SupervisedBatch, vocabulary_size: int) -> Iterator[SupervisedBatch]:
    """Divide a batch so that each pass fits into memory."""
    length = batch.tokens.shape[1]
    learned = (batch.labels != _IGNORED).sum(1)
    begin = 0
    for end in range(1, len(learned) + 1):
        is_last = end == len(learned)
        if not is_last:
            more = end + 1 - begin
            logits = int(learned[begin : end + 1].sum()) * vocabulary_size
            if more * length <= _PASS_TOKENS and logits <= _PASS_LOGITS:
                continue
        yield SupervisedBatch(tokens=batch.tokens[begin:end], labels=batch.labels[begin:end])
        begin = end


@contextmanager
def _threads(parameter_count: int) -> Generator[None]:
    """Let a model that is large enough have every core: nothing else of a run works yet."""
    before = torch.get_num_threads()
    if parameter_count >= _MANY_PARAMETERS:
        affinity: Any = getattr(psutil.Process(), "cpu_affinity", None)
        torch.set_num_threads(len(affinity()) if affinity else os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def supervised_rate(schedule: Schedule, step: int) -> float:
    """Return the learning rate of a step, counted from 1: up in the first tenth, then down."""
    rise = max(1.0, _RISE_SHARE * schedule.step_count)
    if step <= rise:
        return schedule.learning_rate * step / rise
    done = (step - rise) / max(1.0, schedule.step_count - rise)
    return schedule.learning_rate * (1 - (1 - _LAST_RATE_SHARE) * done)
