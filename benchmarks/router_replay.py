"""How far a trainer is from the sampler: a dense model, one with experts, and that with replay.

The embedded engine samples in bf16, and a trainer in f32 looks at the same weights. Each model is
warmed up on sorting letters first, so that its probabilities mean something. Both have the same
depth and width; a token takes two experts, together as wide as the dense layers.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
import torch

from astraflow.config.recipe import EngineSettings, WarmUp
from astraflow.core.batches import BatchPart
from astraflow.core.code import add_code_folder, load
from astraflow.core.ids import BatchId, PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import ROUTED_EXPERTS, Column, ColumnAxis
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine, load_tokenizer
from astraflow.engines.protocol import Generation
from astraflow.trainers.causal_model import CausalModel, load_causal_model, prepare_torch
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.model_files import save_model
from astraflow.trainers.passes import passes_of
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.supervised import (
    Schedule,
    new_model,
    train_on_batches,
    tutored_batches,
)
from astraflow.workflows.building import build_tutor
from astraflow.workflows.tutors import Tutor, write_tokenizer

Found = dict[str, dict[str, float]]
"""Numbers of each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sampled sequence."""

    prompt: list[int]
    generation: Generation


def make(folder: Path, tutor: Tutor, *, steps: int, seed: int) -> Path:
    """Write a warmed-up model whose weights are what bf16 can say."""
    write_tokenizer(folder / "tokenizer", tutor.alphabet)
    settings = WarmUp(
        tutor="letter_sort:SortTutor", step_count=steps, batch_size=64, learning_rate=2e-3
    )
    schedule = Schedule.of(settings)
    module = new_model(tutor.model_config(), seed=seed)
    pairs = tutored_batches(schedule, tutor, tokenizer_dir=folder / "tokenizer", seed=seed)
    train_on_batches(module, pairs, schedule, report=print)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16().float())
    save_model(module, folder / "model", companions_of=folder / "tokenizer")
    return folder / "model"


async def sample(directory: Path, prompts: list[list[int]]) -> list[Row]:
    """Sample one answer to each prompt in bf16."""
    settings = EngineSettings(device="cpu", dtype="bf16")
    engine = EmbeddedEngine.from_directory(directory, settings, PolicyId("solver"))
    try:
        await engine.load_directory(version=0)
        found = await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(max_new_tokens=8, seed=seed))
                for seed, prompt in enumerate(prompts)
            )
        )
    finally:
        await engine.close()
    return [Row(prompt=p, generation=g) for p, g in zip(prompts, found, strict=True)]


def rows_of(sampled: list[Row], *, with_routes: bool) -> TrainRows:
    """Return what was sampled as a trainer gets it."""
    tokens = [np.array([*row.prompt, *row.generation.tokens], np.int32) for row in sampled]
    masks = [np.arange(len(t)) >= len(r.prompt) for t, r in zip(tokens, sampled, strict=True)]
    logprobs = [np.zeros(len(each), np.float32) for each in tokens]
    for mask, mine, row in zip(masks, logprobs, sampled, strict=True):
        mine[mask] = row.generation.logprobs
    columns = {
        "tokens": np.concatenate(tokens),
        "loss_mask": np.concatenate(masks),
        "logprobs": np.concatenate(logprobs),
        "advantages": np.concatenate(masks).astype(np.float32),
    }
    routes = [row.generation.routed_experts for row in sampled]
    if with_routes:
        columns[ROUTED_EXPERTS] = np.concatenate([each for each in routes if each is not None])
    names = [str(index) for index in range(len(sampled))]
    part = BatchPart(
        batch_id=BatchId("b"),
        index=0,
        row_offsets=np.concatenate([[0], np.cumsum([len(each) for each in tokens])]),
        trajectory_ids=tuple(map(TrajectoryId, names)),
        rollout_ids=tuple(map(RolloutId, names)),
        columns={name: Column(axis=ColumnAxis.TOKEN, values=v) for name, v in columns.items()},
    )
    return TrainRows.from_parts([part])


@torch.no_grad()
def mismatch(model: CausalModel, rows: TrainRows) -> dict[str, float]:
    """Return how far the trainer is from the sampler, in nats."""
    gaps = np.zeros(len(rows.loss))
    for one in passes_of(rows, np.ones(rows.row_count, np.bool_), max_tokens=8192):
        tokens = PassTokens.of(rows, one)
        logprobs = log_softmax_of(model, tokens)[0].numpy()
        gaps[tokens.loss_indices] = logprobs - rows.loss.sampler_logprobs[tokens.loss_indices]
    return {
        "abs_mean": float(np.abs(gaps).mean()),
        "abs_p99": float(np.quantile(np.abs(gaps), 0.99)),
        "abs_max": float(np.abs(gaps).max()),
        "kl_k3": float((np.exp(gaps) - 1 - gaps).mean()),
        "tokens": float(len(gaps)),
    }


def measure(prompt_count: int, *, steps: int, seed: int, experts: int) -> Found:
    """Return the mismatch of each way, of models of one seed."""
    prompt_rows = load("letter_sort:prompt_rows", what="the task")
    texts = [str(row["prompt"]) for row in prompt_rows(prompt_count, held_out=False, seed=seed)]
    results: Found = {}
    for name, options in (("dense", {}), ("experts", {"experts": experts})):
        with tempfile.TemporaryDirectory() as folder:
            tutor = build_tutor("letter_sort:SortTutor", options)
            directory = make(Path(folder), tutor, steps=steps, seed=seed)
            tokenizer = load_tokenizer(directory)
            prompts = [list(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
            sampled = asyncio.run(sample(directory, prompts))
            model = load_causal_model(directory, device="cpu")
        results[name] = mismatch(model, rows_of(sampled, with_routes=False))
        if name == "experts":
            results["replay"] = mismatch(model, rows_of(sampled, with_routes=True))
    return results


def summed_up(seeds: Sequence[Found]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return mean and standard error over seeds, by way and number."""
    return {
        way: {key: _spread([found[way][key] for found in seeds]) for key in numbers}
        for way, numbers in seeds[0].items()
    }


def _spread(values: Sequence[float]) -> tuple[float, float]:
    deviation = np.std(values, ddof=1) if len(values) > 1 else np.nan
    return float(np.mean(values)), float(deviation / np.sqrt(len(values)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--steps", type=int, default=150, help="Of the warm-up.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    add_code_folder(Path(__file__).parents[1] / "recipes")
    prepare_torch(thread_count=1)
    seeds = [
        measure(options.prompts, steps=options.steps, seed=seed, experts=options.experts)
        for seed in range(options.seeds)
    ]
    for way, numbers in summed_up(seeds).items():
        said = (f"{key} {mean:.5f} ± {error:.5f}" for key, (mean, error) in numbers.items())
        print(f"{way:8}", "  ".join(said))
    print(f"{options.seeds} seeds, ± standard error; CPU {process_time():.1f} s")
    if options.json:
        options.json.write_text(json.dumps(seeds, indent=2))


if __name__ == "__main__":
    main()
