"""Compare the embedded engine with one static batched `generate` of transformers.

Two loads of 32 requests, on the demo's model and on one of more than 100 M parameters, both
sides with the same number of threads, in turns within one run:

- equal: all requests at once, the same prompt and completion length. Bar: 0.9 x static.
- ragged: prompts and completions of 8 to 256 tokens, arriving evenly over a window, given as a
  share of the time that the static batch takes (`--windows`). A static batch can start only
  when the last one is there and ends with its longest; the engine starts with the first.
  Bar: 1.5 x static.

The ragged ratio depends on the window: every one measured is written, none is chosen. Both
sides tend to the same as the window grows, since then both only wait for arrivals.

Throughput is useful completion tokens per second from the first arrival to the last
result. Random weights, no end tokens: what is computed does not depend on what is said.

    python benchmarks/embedded_engine.py --out embedded_engine.json
"""

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine

REQUESTS = 32
SHORTEST, LONGEST = 8, 256
MODELS: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": 14,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 288,
        "tie_word_embeddings": True,
    },
    "100m": {
        "vocab_size": 65_536,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 2048,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: what it asks and when it arrives, in shares of the arrival window."""

    prompt: list[int]
    length: int
    arrival: float


def jobs_of(*, vocab_size: int, equal_length: int | None, seed: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    jobs: list[Job] = []
    for index in range(REQUESTS):
        prompt_length = equal_length or int(rng.integers(SHORTEST, LONGEST + 1))
        length = equal_length or int(rng.integers(SHORTEST, LONGEST + 1))
        prompt = rng.integers(3, vocab_size, prompt_length).tolist()
        arrival = 0.0 if equal_length else index / (REQUESTS - 1)
        jobs.append(Job(prompt=prompt, length=length, arrival=arrival))
    return jobs


def run_static(model: Any, jobs: list[Job]) -> float:
    """Return the seconds of one padded batch that runs to its longest completion."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.zeros((len(jobs), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    longest = max(job.length for job in jobs)
    # A value left at None is filled in from the model's own configuration.
    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        max_new_tokens=longest,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        eos_token_id=None,
    )
    start = time.perf_counter()
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    elapsed_s = time.perf_counter() - start
    assert output.shape == (len(jobs), width + longest)
    return elapsed_s


async def run_engine(engine: EmbeddedEngine, jobs: list[Job], *, window_s: float) -> float:
    """Return the seconds from the first arrival to the last result."""
    start = time.perf_counter()

    async def ask(seed: int, job: Job) -> None:
        await asyncio.sleep(max(0.0, start + job.arrival * window_s - time.perf_counter()))
        sampling = SamplingParams(max_new_tokens=job.length, seed=seed, ignore_eos=True)
        result = await engine.generate(job.prompt, sampling)
        assert len(result.tokens) == job.length

    async with asyncio.TaskGroup() as group:
        for seed, job in enumerate(jobs):
            group.create_task(ask(seed, job))
    return time.perf_counter() - start


async def compare(
    engine: EmbeddedEngine, model: Any, jobs: list[Job], *, rounds: int, window: float
) -> dict[str, Any]:
    """Run both sides in turns; return medians and the ratio of throughputs."""
    useful = sum(job.length for job in jobs)
    statics: list[float] = []
    engines: list[float] = []
    for _ in range(rounds):
        static_s = await asyncio.to_thread(run_static, model, jobs)
        window_s = static_s * window
        statics.append(window_s + static_s)
        engines.append(await run_engine(engine, jobs, window_s=window_s))
    ratios = [static / own for static, own in zip(statics, engines, strict=True)]
    return {
        "useful_tokens": useful,
        "static_s": statistics.median(statics),
        "engine_s": statistics.median(engines),
        "static_tokens_per_s": useful / statistics.median(statics),
        "engine_tokens_per_s": useful / statistics.median(engines),
        "window": window,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ratios": ratios,
    }


async def measure(
    name: str, *, rounds: int, threads: int, equal_length: int, windows: list[float]
) -> dict[str, Any]:
    shape = MODELS[name]
    config = LlamaConfig(
        **shape, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
        settings = EngineSettings(max_batch=REQUESTS, device="cpu", thread_count=threads)
        engine = EmbeddedEngine.from_directory(Path(folder), settings, PolicyId("policy"))
        await engine.load_directory(0)
    vocab_size: int = shape["vocab_size"]
    warm = jobs_of(vocab_size=vocab_size, equal_length=8, seed=0)
    await compare(engine, model, warm, rounds=1, window=0.0)
    equal = jobs_of(vocab_size=vocab_size, equal_length=equal_length, seed=1)
    ragged = jobs_of(vocab_size=vocab_size, equal_length=None, seed=2)
    try:
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "equal": await compare(engine, model, equal, rounds=rounds, window=0.0),
            "ragged": [
                await compare(engine, model, ragged, rounds=rounds, window=window)
                for window in windows
            ],
        }
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--equal-length", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("embedded_engine.json"))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    results = {
        name: asyncio.run(
            measure(
                name,
                rounds=asked.rounds,
                threads=asked.threads,
                equal_length=asked.equal_length,
                windows=asked.windows,
            )
        )
        for name in asked.models
    }
    report = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": asked.threads,
        "requests": REQUESTS,
        "bars": {"equal": 0.9, "ragged": 1.5},
        "models": results,
    }
    asked.out.write_text(json.dumps(report, indent=2) + "\n")
    for name, result in results.items():
        for load, line in [("equal", result["equal"])] + [("ragged", r) for r in result["ragged"]]:
            print(
                f"{name:6} {load:7} window {line['window']:.2f}  static "
                f"{line['static_tokens_per_s']:8.0f} tok/s  engine "
                f"{line['engine_tokens_per_s']:8.0f} tok/s  ratio {line['ratio']:.2f} "
                f"({line['ratio_min']:.2f} to {line['ratio_max']:.2f})"
            )


if __name__ == "__main__":
    main()
