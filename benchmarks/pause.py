"""Measure the pause of the embedded engine: the gap between tokens while versions go live.

Three ways of going live, in turns within one run, while one or more sequences are decoded:

- scatter: a sparse update, as the engine applies it: changed values written in place;
- repoint: the same update as whole tensors made beside the live ones, which the parameters are
  then pointed at; the way of the engine while an older version is pinned;
- reload: the decode loop stops, all weights are copied over, and it goes on.

A gap is the time between two decode steps of the engine's own thread. What a swap costs is the
longest gap between its hand-over and its report, less the median gap of the same round without
swaps. Peak memory is what the process grew by while the swaps of a way came in.

    python benchmarks/pause.py --out pause.json
"""

import argparse
import asyncio
import json
import platform
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, SwapReport, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.embedded import EmbeddedEngine

disable_progress_bar()

POLICY = PolicyId("policy")
BAR_MS = 60.0
SHAPES: dict[str, dict[str, Any]] = {
    "256m": {
        "vocab_size": 32_768,
        "hidden_size": 1024,
        "num_hidden_layers": 15,
        "num_attention_heads": 16,
        "intermediate_size": 3456,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 192,
        "tie_word_embeddings": True,
    },
}
Swap = Callable[[WeightUpdate], Awaitable[SwapReport]]


class Steps:
    """When the engine began each decode step."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._times: list[float] = []
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def between(self, start: float, end: float) -> np.ndarray:
        """Return the gaps of all steps from `start` to the first one after `end`, f64[n]."""
        times = np.array(self._times)
        first = max(0, int(np.searchsorted(times, start)) - 1)
        return np.diff(times[first : int(np.searchsorted(times, end)) + 1])

    def stop(self) -> None:
        """Watch no longer."""
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        last = -1
        while not self._is_done.is_set():
            count = self._engine.load().sampled_token_count
            if count != last:
                last = count
                self._times.append(time.perf_counter())
            self._is_done.wait(0.0005)


class Peak:
    """Highest resident memory of this process while it is watched."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self.grown_nbytes = 0
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Watch no longer; return the growth in bytes."""
        self._is_done.set()
        self._thread.join()
        return self.grown_nbytes

    def _watch(self) -> None:
        while not self._is_done.wait(0.002):
            grown = self._process.memory_info().rss - self._start
            self.grown_nbytes = max(self.grown_nbytes, grown)


class Streams:
    """Generations that never end while the benchmark runs."""

    def __init__(self, engine: EmbeddedEngine, *, count: int, length: int) -> None:
        self._engine = engine
        self._sampling = SamplingParams(max_new_tokens=length, ignore_eos=True)
        self._count = count
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        """Submit all, and wait until they are decoded."""
        self._tasks = [
            asyncio.ensure_future(self._engine.generate([3 + n, 4, 5], self._sampling))
            for n in range(self._count)
        ]
        while self._engine.load().running_count < self._count:  # noqa: ASYNC110  it tells no one
            await asyncio.sleep(0.005)

    async def abort(self) -> None:
        """Cancel all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def sparse_update(
    engine: EmbeddedEngine, version: int, *, share: float, rng: np.random.Generator
) -> WeightUpdate:
    """Return new random bits of moderate size for a share of the elements of every tensor."""
    parts: list[TensorUpdate] = []
    for name, shape in engine.named_tensors.items():
        spec = TensorSpec(name=name, dtype=Dtype.BF16, shape=shape, offset=0)
        indices = np.flatnonzero(rng.random(spec.element_count, np.float32) < share)
        low = 0x3C00 if len(shape) > 1 else 0x3F80  # about 0.01; norms stay at 1
        values = rng.integers(low, low + 128, len(indices), np.uint16)
        parts.append(TensorUpdate(spec=spec, indices=indices, values=values))
    return WeightUpdate(
        policy_id=POLICY, version=version, base_version=version - 1, tensors=tuple(parts)
    )


def patch_nbytes(update: WeightUpdate) -> int:
    return sum(
        part.values.nbytes + (0 if part.indices is None else part.indices.nbytes)
        for part in update.tensors
    )


class Bench:
    """One engine, its streams, and the ways of going live."""

    def __init__(self, engine: EmbeddedEngine, folder: Path, asked: argparse.Namespace) -> None:
        self._engine = engine
        self._folder = folder
        self._asked = asked
        self._rng = np.random.default_rng(asked.seed)
        self._streams = Streams(engine, count=asked.streams, length=asked.length)
        self._steps = Steps(engine)
        self._ways: dict[str, Swap] = {
            "scatter": engine.swap,
            "repoint": self._repoint,
            "reload": self._reload,
        }
        self._rounds: dict[str, list[dict[str, float]]] = {way: [] for way in self._ways}

    async def run(self) -> dict[str, Any]:
        """Return the summary of each way."""
        await self._streams.start()
        await self._engine.swap(self._next_update())
        for _ in range(self._asked.rounds):
            for way, swap in self._ways.items():
                self._rounds[way].append(await self._round(swap, self._next_update()))
        await self._streams.abort()
        self._steps.stop()
        return {way: summary(rounds) for way, rounds in self._rounds.items()}

    def _next_update(self) -> WeightUpdate:
        version = (self._engine.version or 0) + 1
        return sparse_update(self._engine, version, share=self._asked.share, rng=self._rng)

    async def _round(self, swap: Swap, update: WeightUpdate) -> dict[str, float]:
        quiet = time.perf_counter()
        await asyncio.sleep(self._asked.quiet_s)
        before, peak = time.perf_counter(), Peak()
        report = await swap(update)
        after = time.perf_counter()
        grown = peak.stop()
        await asyncio.sleep(self._asked.quiet_s / 2)
        normal = float(np.median(self._steps.between(quiet, before)))
        gaps = self._steps.between(before, after)
        return {
            "normal_ms": 1e3 * normal,
            "gap_ms": 1e3 * float(gaps.max()),
            "extra_ms": 1e3 * (float(gaps.max()) - normal),
            "pause_ms": 1e3 * report.pause_s,
            "swap_ms": 1e3 * (after - before),
            "grown_per_patch": grown / patch_nbytes(update),
            "aborted": float(self._asked.streams - report.inflight_count),
        }

    async def _repoint(self, update: WeightUpdate) -> SwapReport:
        """Pin, so that every changed tensor is made anew."""
        version = self._engine.version or 0
        await self._engine.pin(version)
        report = await self._engine.swap(update)
        await self._engine.unpin(version)
        return report

    async def _reload(self, update: WeightUpdate) -> SwapReport:
        """Stop decoding, read all weights from files, start again."""
        start = time.perf_counter()
        await self._streams.abort()
        await self._engine.load_directory(update.version, self._folder)
        await self._streams.start()
        return SwapReport(
            version=update.version, pause_s=time.perf_counter() - start, inflight_count=0
        )


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return least, p50, p99 and greatest of what was measured, by name."""
    columns = {name: np.array([each[name] for each in rounds]) for name in rounds[0]}
    result: dict[str, Any] = {
        name: {
            "min": float(column.min()),
            "p50": float(np.median(column)),
            "p99": float(np.percentile(column, 99)),
            "max": float(column.max()),
        }
        for name, column in columns.items()
    }
    return {**result, "aborted": int(columns["aborted"].sum()), "rounds": len(rounds)}


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(asked.seed)
    config = LlamaConfig(
        **SHAPES[asked.model],
        max_position_embeddings=max(1024, 2 * asked.length),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        settings = EngineSettings(
            max_batch=max(8, asked.streams), device="cpu", dtype="bf16", thread_count=asked.threads
        )
        engine = EmbeddedEngine.from_directory(folder, settings, POLICY)
        try:
            await engine.load_directory(0)
            ways = await Bench(engine, folder, asked).run()
        finally:
            await engine.close()
        shapes = engine.named_tensors.values()
        return {"parameters": sum(int(np.prod(shape)) for shape in shapes), "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="256m", choices=list(SHAPES))
    parser.add_argument("--share", type=float, default=0.01, help="of the elements that change")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--length", type=int, default=16_384, help="tokens of a stream")
    parser.add_argument("--quiet-s", type=float, default=1.0, help="between two swaps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("pause.json"))
    asked = parser.parse_args()
    result = asyncio.run(measure(asked))
    report = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "load_after": psutil.getloadavg(),
        "asked": {name: str(value) for name, value in vars(asked).items()},
        "bar_ms": BAR_MS,
        **result,
    }
    asked.out.write_text(json.dumps(report, indent=2) + "\n")
    for way, line in result["ways"].items():
        extra, pause = line["extra_ms"], line["pause_ms"]
        print(
            f"{way:8} gap beyond a step {line['normal_ms']['p50']:6.1f} ms: "
            f"min {extra['min']:7.1f}  p50 {extra['p50']:7.1f}"
            f"  p99 {extra['p99']:7.1f}  max {extra['max']:7.1f}   pause p50 {pause['p50']:7.1f} "
            f"max {pause['max']:7.1f}   memory {line['grown_per_patch']['max']:5.2f} x patch"
            f"   aborted {line['aborted']}"
        )


if __name__ == "__main__":
    main()
