"""Small models and batches of known content."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.client.trainer import TrainerBatch
from astraflow.core.batches import BatchHeader, BatchPart
from astraflow.core.ids import BatchId, PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.model_files import save_model
from astraflow.workflows.tutors import write_tokenizer
from crash_ends.nursery import Nursery

VOCABULARY = 14
Row = dict[str, Any]

# Of an optimizer that takes gradients as they have added up.
UNCLIPPED = 1e9


@contextmanager
def seen_gradients(module: nn.Module) -> Generator[list[dict[str, Tensor]]]:
    """Yield what gets the gradients of each update, by name, as the optimizer finds them."""
    seen: list[dict[str, Tensor]] = []

    def look(*_: object) -> None:
        seen.append({name: p.grad.clone() for name, p in module.named_parameters()})

    # It is called by all optimizers of the process.
    hook = register_optimizer_step_pre_hook(look)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def run_apart(nursery: Nursery, tmp_path: Path) -> Callable[..., TextIO]:
    """Start a function in a process of its own; return what it says until it ends."""
    pipes = (tmp_path / f"said-{number}" for number in count())

    def run(function: str, *arguments: object) -> TextIO:
        pipe = next(pipes)
        os.mkfifo(pipe)
        nursery.start(function, *map(str, arguments), output=pipe)
        return pipe.open()

    return run


def llama_config(**fields: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **fields,
        }
    )


@pytest.fixture(scope="session")
def make_model() -> Callable[..., CausalModel]:
    def make(*, never_sampled: Sequence[int] = (), **fields: Any) -> CausalModel:
        torch.manual_seed(0)
        return CausalModel(LlamaForCausalLM(llama_config(**fields)), never_sampled=never_sampled)

    return make


@pytest.fixture
def model_dir(tmp_path: Path, make_model: Callable[..., CausalModel]) -> Path:
    target = tmp_path / "model"
    write_tokenizer(tmp_path / "tokenizer", "abcdefghij>")
    save_model(make_model().module, target, companions_of=tmp_path / "tokenizer")
    return target


@pytest.fixture(name="make_row", scope="session")
def _make_row() -> Callable[..., Row]:
    return make_row


@pytest.fixture(name="make_rows", scope="session")
def _make_rows() -> Callable[..., list[Row]]:
    return make_rows


@pytest.fixture
def make_batch() -> Callable[..., TrainerBatch]:
    def make(count: int, *, seed: int = 0) -> TrainerBatch:
        return to_batch([to_part(make_rows(count, seed=seed))])

    return make


@pytest.fixture(name="to_part", scope="session")
def _to_part() -> Callable[..., BatchPart]:
    return to_part


def make_row(
    rng: np.random.Generator,
    *,
    prompt: int = 4,
    length: int = 9,
    advantage: float = 1.0,
    version: int = 0,
    temperature: float = 1.0,
    reward: float = 0.0,
) -> Row:
    mask = np.arange(length) >= prompt
    logprobs = np.where(mask, -rng.random(length) * 3, 0).astype(np.float32)
    return {
        "tokens": rng.integers(3, VOCABULARY, length).astype(np.int32),
        "loss_mask": mask,
        "logprobs": logprobs,
        "advantages": np.where(mask, advantage, 0).astype(np.float32),
        "temperature": temperature,
        "reward": reward,
        "version": version,
    }


def make_rows(count: int, *, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    return [
        make_row(
            rng,
            prompt=int(rng.integers(1, 5)),
            length=int(rng.integers(6, 15)),
            advantage=float(rng.normal()),
        )
        for _ in range(count)
    ]


def to_part(rows: Sequence[Row], *, index: int = 0, without: Sequence[str] = ()) -> BatchPart:
    token_columns = ("tokens", "loss_mask", "logprobs", "advantages", "loss_weights")
    token_columns += ("routed_experts",)
    columns = {
        name: Column(axis=ColumnAxis.TOKEN, values=np.concatenate([row[name] for row in rows]))
        for name in token_columns
        if name in rows[0] and name not in without
    }
    versions = np.array([row["version"] for row in rows], np.int64)
    temperatures = np.array([row["temperature"] for row in rows], np.float32)
    for name, values in (
        ("min_versions", versions),
        ("max_versions", versions),
        ("temperature", temperatures),
        ("rewards", np.array([row["reward"] for row in rows], np.float32)),
        ("group_index", np.array([row.get("group", -1) for row in rows], np.int32)),
    ):
        columns[name] = Column(axis=ColumnAxis.ROW, values=values)
    names = [f"{index}-{number}" for number in range(len(rows))]
    return BatchPart(
        batch_id=BatchId("b1"),
        index=index,
        row_offsets=np.concatenate([[0], np.cumsum([len(row["tokens"]) for row in rows])]),
        trajectory_ids=tuple(map(TrajectoryId, names)),
        rollout_ids=tuple(map(RolloutId, names)),
        columns=columns,
    )


def to_batch(parts: Sequence[BatchPart]) -> TrainerBatch:
    mask = [part.values("loss_mask") for part in parts]
    header = BatchHeader(
        batch_id=BatchId("b1"),
        policy_id=PolicyId("solver"),
        version=0,
        part_count=len(parts),
        row_count=sum(part.row_count for part in parts),
        token_count=sum(map(len, mask)),
        loss_token_count=int(sum(each.sum() for each in mask)),
        groups=(),
        policy_ids=(PolicyId("solver"),),
    )
    return TrainerBatch(header=header, parts=tuple(parts), wait_s=0.0)
