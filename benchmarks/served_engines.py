"""Measure what an update costs inside a real server: its pause, and the bytes that it writes.

One server of a model with random weights. In turns within one run:

- sparse: a share of all elements changes, spread evenly, and is written in place;
- dense: all elements come and are written in place, in the same pause by the same calls;
- loader: the server's own loader reads all of them from safetensors (vLLM alone).

A pause is the time from the call that stops decoding to the answer of the one that goes on, while
nothing else is asked of the server. All are read back before the server goes on. Beside it stands
what the server itself spent on writing. In every second round one completion is streamed all the
while, and the longest time between two of its tokens is the gap, which holds a decode step too.

    ASTRAFLOW_VLLM_PYTHON=... python benchmarks/served_engines.py --kind vllm --json out.json
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.building import build_engine

disable_progress_bar()

POLICY = PolicyId("policy")
BAR = 0.15
# Of a completion, before an update comes.
STEPS = 12
SIZES: dict[str, dict[str, Any]] = {
    "138m": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 192,
    },
}


def write_model(folder: Path, size: str) -> int:
    """Write a model in bf16 and return its element count."""
    config = LlamaConfig(**SIZES[size], head_dim=32 if size == "tiny" else 64)
    config.tie_word_embeddings, config.max_position_embeddings = True, 512
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class State:
    """The weights of a policy, and updates of them."""

    def __init__(self, folder: Path) -> None:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.bits: dict[str, np.ndarray] = {
            name: parameter.detach().view(torch.int16).numpy().view(np.uint16).copy()
            for name, parameter in model.named_parameters()
        }
        self.version = 0

    def sparse(self, share: float) -> WeightUpdate:
        """Change a share of the elements of each tensor by their lowest bit."""
        step = round(1 / share)
        parts: list[TensorUpdate] = []
        for name, bits in self.bits.items():
            flat = bits.reshape(-1)
            indices = np.arange(self.version % step, flat.size, step)
            flat[indices] ^= 1
            parts.append(_part(name, bits.shape, flat[indices], indices))
        return self._update(parts, base=self.version)

    def dense(self) -> WeightUpdate:
        """Return all elements."""
        parts = [_part(n, bits.shape, bits.reshape(-1), None) for n, bits in self.bits.items()]
        return self._update(parts, base=None)

    def _update(self, parts: list[TensorUpdate], *, base: int | None) -> WeightUpdate:
        self.version += 1
        return WeightUpdate(
            policy_id=POLICY, version=self.version, base_version=base, tensors=tuple(parts)
        )


def _part(
    name: str, shape: tuple[int, ...], values: np.ndarray, indices: np.ndarray | None
) -> TensorUpdate:
    spec = TensorSpec(name=name, dtype=Dtype.BF16, shape=shape, offset=0)
    return TensorUpdate(spec=spec, indices=indices, values=values)


async def measure(kind: str, folder: Path, rounds: int, dtype: str) -> list[dict[str, Any]]:
    """Return a row per update."""
    settings = EngineSettings(kind=kind, device="cpu", dtype=dtype, max_batch=8, max_context=512)
    engine: Any = build_engine(folder, settings, POLICY)
    state, rows = State(folder), list[dict[str, Any]]()
    try:
        for _ in range(2):
            await engine.swap(state.dense())
        for number in range(rounds):
            for way, share in (("sparse", 0.001), ("sparse", 0.01), ("dense", 1.0)):
                update = state.dense() if way == "dense" else state.sparse(share)
                measured = await (_busy if number % 2 else _idle)(engine, update)
                rows.append({"way": way, "share": share} | measured | await _said(engine))
            if kind == "vllm":
                rows.append(await _own_loader(engine, folder))
        await _assert_true(engine, state)
    finally:
        await engine.close()
    return rows


async def _idle(engine: Any, update: WeightUpdate) -> dict[str, Any]:
    """Make a version live while nothing else is asked."""
    started = time.perf_counter()
    report = await engine.swap(update)
    total_s = time.perf_counter() - started
    return {"pause_ms": 1e3 * report.pause_s, "total_ms": 1e3 * total_s, "inflight": 0}


async def _busy(engine: Any, update: WeightUpdate) -> dict[str, Any]:
    """Make a version live while one completion is streamed, and see how long it stands still."""
    at: list[float] = []
    sampling = SamplingParams(max_new_tokens=500, ignore_eos=True, seed=0)
    task = asyncio.ensure_future(
        engine.generate([1, 2, 3], sampling, watch=lambda _: at.append(time.perf_counter()))
    )
    await _until(lambda: len(at) >= STEPS)
    steps = np.diff(at)
    before = len(at) - 1
    report = await engine.swap(update)
    seen = len(at)
    await _until(lambda: len(at) >= seen + 2)
    task.cancel()
    await asyncio.wait([task])
    return {
        "pause_ms": 1e3 * report.pause_s,
        "inflight": report.inflight_count,
        "gap_ms": 1e3 * float(np.diff(at[before:]).max()),
        "step_ms": 1e3 * float(np.median(steps)),
    }


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  what is watched has no event
        await asyncio.sleep(0.001)


async def _said(engine: Any) -> dict[str, Any]:
    report = engine._dialect.report  # noqa: SLF001
    return {
        "written_nbytes": report.get("nbytes"),
        "write_ms": 1e3 * report.get("apply_s", 0),
    }


async def _own_loader(engine: Any, folder: Path) -> dict[str, Any]:
    """Have vLLM load the first weights, and those of the last version again."""
    http = engine._server.http  # noqa: SLF001
    started = time.perf_counter()
    await http.post("/pause", params={"mode": "keep"})
    told = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    answer = await http.post("/collective_rpc", json=told)
    await http.post("/resume")
    return {
        "way": "loader",
        "share": 1.0,
        "pause_ms": 1e3 * (time.perf_counter() - started),
        "ok": answer.is_success,
    }


async def _assert_true(engine: Any, state: State) -> None:
    """Patch once more onto all weights, and compare with loading all."""
    await engine.swap(state.dense())
    await engine.swap(state.sparse(0.01))
    patched = await engine.checksums()
    await engine.swap(state.dense())
    assert await engine.checksums() == patched


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the least pause of each way while nothing ran, the least gap while something did.

    Noise of the machine, and the step that a pause waits for, only add.
    """

    def asked(way: str, share: float) -> list[dict[str, Any]]:
        return [r for r in rows if (r["way"], r["share"]) == (way, share)]

    def least(way: str, share: float) -> float:
        idle = [r["pause_ms"] for r in asked(way, share) if not r.get("inflight")]
        return min(idle, default=float("nan"))

    def gap(way: str, share: float) -> float:
        return min((r["gap_ms"] for r in asked(way, share) if "gap_ms" in r), default=float("nan"))

    sparse, dense = least("sparse", 0.01), least("dense", 1.0)
    return {
        "pause_ms": {
            "0.1 %": least("sparse", 0.001),
            "1 %": sparse,
            "dense": dense,
            "loader": least("loader", 1.0),
        },
        "gap_ms": {
            "0.1 %": gap("sparse", 0.001),
            "1 %": gap("sparse", 0.01),
            "dense": gap("dense", 1.0),
        },
        "ratio": sparse / dense,
        "bar": BAR,
        "holds": sparse <= BAR * dense,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--size", choices=tuple(SIZES), default="138m")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        element_count = write_model(Path(folder), asked.size)
        rows = asyncio.run(measure(asked.kind, Path(folder), asked.rounds, asked.dtype))
    result = {
        "kind": asked.kind,
        "dtype": asked.dtype,
        "element_count": element_count,
        "load": os.getloadavg(),
        "machine": platform.processor(),
        **summary(rows),
        "rows": rows,
    }
    for row in rows:
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
