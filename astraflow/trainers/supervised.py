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

from astraflow.config.recipe import Loss, ModelConfig, Optimizer, Tiny, TrainerConfig, WarmUp
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.causal_model import CausalModel, hide_progress_bars, load_causal_model
from astraflow.trainers.demonstrations import (
    SupervisedRow,
    read_demonstrations,
    tiny_config,
    tokenize_demonstrations,
    write_tiny_tokenizer,
)
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.model_files import save_model
from astraflow.trainers.rows import LossTokens, TrainRows
from astraflow.trainers.tensors import seed_everything
from astraflow.workflows.tutors import EOS_ID, Pair, Tutor, write_tokenizer

Report = Callable[[str], None]

# Of the steps, in which the learning rate rises.
_RISE_SHARE = 0.1
# Padded tokens that one pass may have.
_PASS_TOKENS = 4096
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

    @property
    def optimizer(self) -> Optimizer:
        """AdamW, whose rate goes up in the first tenth of the steps, then down."""
        rise = max(1, round(_RISE_SHARE * self.step_count))
        return Optimizer(
            learning_rate=self.learning_rate,
            warm_up_steps=rise,
            decay=(rise, self.step_count) if rise < self.step_count else None,
        )


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
) -> Iterator[TrainRows]:
    import tokenizers  # noqa: PLC0415 - comes with torch's extra

    tokenizer: Any = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    rng = np.random.default_rng(seed)
    for _ in range(schedule.step_count):
        yield pack_pairs(tokenizer, [tutor.pair(rng) for _ in range(schedule.batch_size)])


def demonstrated_batches(
    rows: Sequence[SupervisedRow], schedule: Schedule, *, seed: int
) -> Iterator[TrainRows]:
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


def pack_pairs(tokenizer: Any, pairs: Sequence[Pair]) -> TrainRows:
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


def pack_rows(rows: Sequence[SupervisedRow]) -> TrainRows:
    """Return rows whose loss is on what is learned; nothing is known of a sampler."""
    lengths = [len(row.tokens) for row in rows]
    learned = np.flatnonzero(np.concatenate([row.learned for row in rows]))
    return TrainRows.of(
        np.concatenate([row.tokens for row in rows]).astype(np.int32),
        np.concatenate([[0], np.cumsum(lengths)]),
        LossTokens.plain(learned, np.repeat(np.arange(len(rows)), lengths)[learned]),
    )


def supervised_learner(module: nn.Module, schedule: Schedule) -> PolicyLearner:
    """Return what steps a model by the mean loss per learned token of each batch."""
    settings = TrainerConfig(
        loss=Loss(surrogate="sft"),
        optimizer=schedule.optimizer,
        max_tokens_per_pass=_PASS_TOKENS,
        share_prefixes="never",
    )
    return PolicyLearner(CausalModel(module), settings)


def train_on_batches(
    module: nn.Module, batches: Iterator[TrainRows], schedule: Schedule, *, report: Report
) -> None:
    """Make one AdamW step per batch; the weights after the last one stay.

    Raises:
        AstraflowError: INVALID_FIELD when the gradient is no longer finite.
    """
    learner = supervised_learner(module, schedule)
    started = told = time.monotonic()
    for step, rows in enumerate(batches, start=1):
        try:
            loss = learner.step(rows, divisor=len(rows.loss))["train/loss"]
        except AstraflowError as error:
            if error.reason is not Reason.INTERNAL:
                raise
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"the gradient of warm-up step {step} is not finite; lower warm_up.learning_rate, "
                f"which is {schedule.learning_rate:g}",
            ) from error
        now = time.monotonic()
        if step in (1, schedule.step_count) or now >= told + _REPORT_EVERY_S:
            told = now
            left = (now - started) / step * (schedule.step_count - step)
            report(f"warm-up step {step}/{schedule.step_count} loss {loss:.3f}, {left:.0f} s left")


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
