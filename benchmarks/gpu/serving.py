"""Parts of a rollout node: the embedded engine's tokens and swaps, and a run of `math`."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from models import SHAPES, SkippedError, copy_rate, model_dir, now
from transformers import AutoModelForCausalLM, GenerationConfig

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.models import find_model
from astraflow.trainers.memory import ModelShape

_ROOT: Final = Path(__file__).parent.parent.parent

# Rows at once, tokens of a prompt, tokens that are sampled after it.
_LOADS: Final = {"cuda": ((1, 128, 128), (64, 128, 128)), "cpu": ((1, 8, 8), (4, 8, 8))}
# Of the elements of every tensor.
_CHANGED: Final = 0.01


def measure_engine(device: str) -> dict[str, Any]:
    """Return tokens per second of the embedded engine and of `generate`, and what a swap takes.

    The floor of a step is the time in which the weights and the keys and values of all rows, at
    half of the tokens to sample, are read once, at the rate of a copy.
    """
    return asyncio.run(_measured_engine(device))


async def _measured_engine(device: str) -> dict[str, Any]:
    folder, found = model_dir(device), dict[str, Any]()
    rows = max(load[0] for load in _LOADS[device])
    settings = EngineSettings(max_batch=rows, max_context=1024, device=device, dtype="bf16")
    policy_id = PolicyId("policy")
    engine = EmbeddedEngine.from_directory(folder, settings, policy_id)
    model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device).eval()
    try:
        await engine.load_directory(0)
        rate = copy_rate(device)
        for load in _LOADS[device]:
            found[f"rows_{load[0]}"] = await _compared(engine, model, device, load, rate)
        del model
        found["swap"] = await _swapped(engine, policy_id, load)
    finally:
        await engine.close()
    return found


async def _compared(
    engine: EmbeddedEngine, model: Any, device: str, load: tuple[int, int, int], rate: float
) -> dict[str, Any]:
    rows, prompt_length, length = load
    ours = await _least_s(device, partial(_generated, engine, load))
    theirs = await _least_s(device, partial(asyncio.to_thread, _plain, model, device, load))
    shape = ModelShape.of(SHAPES[device])
    cached = rows * (prompt_length + length // 2) * 2 * shape.layers * shape.kv_heads * 2
    floor_s = (shape.parameters * 2 + cached) / rate
    tokens, floor = rows * length, rows / floor_s
    return {
        "tokens_per_s": round(tokens / ours),
        "generate_tokens_per_s": round(tokens / theirs),
        "over_generate": round(theirs / ours, 2),
        "of_floor": round(tokens / ours / floor, 3),
    }


async def _least_s(device: str, work: Callable[[], Awaitable[None]]) -> float:
    """Return the seconds of the best of three times; the first one warms up."""
    seconds: list[float] = []
    for _ in range(3):
        started = now(device)
        await work()
        seconds.append(now(device) - started)
    return min(seconds)


async def _generated(engine: EmbeddedEngine, load: tuple[int, int, int]) -> None:
    rows, prompt_length, length = load
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, 500, (rows, prompt_length))

    async def ask(row: int) -> None:
        sampling = SamplingParams(max_new_tokens=length, seed=row, ignore_eos=True)
        result = await engine.generate(prompts[row].tolist(), sampling)
        assert len(result.tokens) == length

    async with asyncio.TaskGroup() as group:
        for row in range(rows):
            group.create_task(ask(row))


def _plain(model: Any, device: str, load: tuple[int, int, int]) -> None:
    rows, prompt_length, length = load
    ids = torch.randint(3, model.config.vocab_size, (rows, prompt_length), device=device)
    model.generation_config.eos_token_id = None
    config = GenerationConfig(
        max_new_tokens=length, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0
    )
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    assert output.shape == (rows, prompt_length + length)


async def _swapped(
    engine: EmbeddedEngine, policy_id: PolicyId, load: tuple[int, int, int]
) -> dict[str, Any]:
    """Swap versions of which a share changes while rows are decoded."""
    rng = np.random.default_rng(0)
    tensors = []
    for name, shape in engine.named_tensors.items():
        spec = TensorSpec(name=name, dtype=Dtype.BF16, shape=shape, offset=0)
        count = max(1, int(spec.element_count * _CHANGED))
        indices = np.unique(rng.integers(0, spec.element_count, count))
        values = rng.integers(0x3C00, 0x3C80, len(indices)).astype(np.uint16)
        tensors.append(TensorUpdate(spec=spec, indices=indices, values=values))
    running = asyncio.ensure_future(_generated(engine, (load[0], load[1], 4 * load[2])))
    pauses, seconds = [], []
    for version in range(3):
        await asyncio.sleep(0.1)
        update = WeightUpdate(
            policy_id=policy_id, version=version + 1, base_version=version, tensors=tuple(tensors)
        )
        started = time.perf_counter()
        report = await engine.swap(update)
        seconds.append(time.perf_counter() - started)
        pauses.append(report.pause_s)
    await running
    changed = sum(len(cast("Any", each.indices)) for each in tensors)
    return {
        "changed": changed,
        "inflight": report.inflight_count,
        "pause_ms": round(1e3 * statistics.median(pauses), 2),
        "staged_and_live_s": round(statistics.median(seconds), 3),
    }


def measure_math(device: str) -> dict[str, Any]:
    """Return what a run of `recipes/math` gains, start to end, with both ends on the device."""
    given = os.environ.get("SMOLLM2")
    if given is None and find_model("smollm2-135m") is None:
        raise SkippedError(
            "SmolLM2 is not here: astraflow models get smollm2-135m, or name its"
            " .gguf file in SMOLLM2"
        )
    model = f"path: {given}" if given else "name: smollm2-135m"
    with tempfile.TemporaryDirectory() as runs:
        command = [
            *(sys.executable, "-m", "astraflow", "run", "recipes/math/cpu.yaml"),
            *("--runs", runs, "--json"),
            *("--set", f"policies.solver.model={{{model}}}"),
            *("--set", f"policies.solver.trainer.device={device}"),
            *("--set", f"raas.engine.device={device}"),
            *(("--set", "policies.solver.trainer.step_count=2") if device == "cpu" else ()),
        ]
        started = time.perf_counter()
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=420
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        report = json.loads(done.stdout)
        names = ("held_out_before", "held_out_after", "train_s", "steps", "rollouts")
        gained = report["held_out_after"] - report["held_out_before"]
        return {
            **{name: report[name] for name in names},
            "gained": round(gained, 3),
            "wall_s": round(seconds, 1),
        }
