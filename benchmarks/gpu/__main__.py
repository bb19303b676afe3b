"""What a GPU makes of the trainer and of publishing, in minutes; the same code runs on a CPU.

    python benchmarks/gpu --json gpu.json
    python benchmarks/gpu --device cpu

`trainer`: steps of the built-in engine on a model of random weights with the shape of Qwen3-1.7B,
with a GPU's defaults: tokens per second, model FLOP utilisation (6 operations per weight and token,
embeddings left out, and half of the square of attention, against the bf16 rate of the data sheet),
the most memory at once, and what `StepMemory` says of it. `plain`: the same with blocks that are
not compiled. `deterministic`: the same with kernels of fixed bits. `packing`: the same on rows of
ragged lengths, packed and padded, in one run. `stall`: what steps take longer when each is
published. `publish`: `device_publish.py`, bytes compared per second against a copy in the device's
memory, and what steps beside it take longer. `engine`: tokens per second of the embedded engine and
of `generate` of transformers, and the pause of a swap under load. `math`: what a run of
`recipes/math` with SmolLM2 gains from its first command to its last, both ends on the device. A
part that cannot run says why, and the others go on.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from models import SHAPES, SkippedError, model_dir, now
from serving import measure_engine, measure_math

from astraflow.config.policies import TrainerConfig
from astraflow.conformance.engine_bench import batch_of
from astraflow.core.batches import BatchPart
from astraflow.core.ids import BatchId, PolicyId, RolloutId, TrajectoryId
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.core.tensors import Dtype
from astraflow.trainers.blocks import resolved
from astraflow.trainers.main import shared_interpreter
from astraflow.trainers.memory import ModelShape, StepMemory
from astraflow.trainers.origin import published_layout
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.weights.publish.publisher import WeightPublisher

_HERE: Final = Path(__file__).parent.parent

# bf16 products without sparsity, per second: NVIDIA's data sheets.
_RATES: Final = {"H100": 989e12, "H200": 989e12, "A100": 312e12}

# Rows of a batch, tokens of a row, tokens of a pass, steps that are measured.
_WORK: Final = {"cuda": (32, 2048, 8192, 3), "cpu": (4, 64, 128, 2)}


def main() -> int:
    """Run all parts, and print what they found."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    result: dict[str, Any] = {"device": _name(args.device), "torch": torch.__version__}
    for name in args.parts:
        started = time.perf_counter()
        result[name] = _tried(PARTS[name], args.device)
        result[name]["seconds"] = round(time.perf_counter() - started, 1)
        # Modules refer to themselves: their memory would count as that of the next part.
        gc.collect()
        print(name, json.dumps(result[name]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _tried(part: Callable[[str], dict[str, Any]], device: str) -> dict[str, Any]:
    if device == "cuda" and not torch.cuda.is_available():
        return {"skipped": "there is no GPU; --device cpu runs the same code"}
    try:
        return part(device)
    except SkippedError as why:
        return {"skipped": str(why)}
    except Exception as error:  # noqa: BLE001 - the other parts are worth their minutes
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def _name(device: str) -> str:
    is_there = device == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if is_there else "cpu"


def measure_trainer(
    device: str,
    *,
    compiled: bool | None = None,
    deterministic: bool = False,
    ragged: bool = False,
    packing: str = "auto",
) -> dict[str, Any]:
    """Return tokens per second of steps, and their memory.

    Args:
        device: By name.
        compiled: Whether blocks are; None: as the device decides.
        deterministic: Whether kernels are of fixed bits.
        ragged: Whether rows are of any length, up to twice that of others.
        packing: Of the recipe.
    """
    row_count, length, pass_tokens, step_count = _WORK[device]
    lengths = np.full(row_count, length)
    if ragged:
        lengths = np.linspace(length // 16, 2 * length - length // 16, row_count).astype(np.int64)
    shape = SHAPES[device]
    engine = _engine(
        device, packing=packing, deterministic=deterministic, fsdp={"compile": compiled}
    )
    batches = [_batch(lengths, shape["vocab_size"], seed=seed) for seed in range(2)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = now(device)
    metrics = engine.train_step(batches[0])
    started = now(device)
    for step in range(step_count):
        metrics = engine.train_step(batches[step % 2])
    seconds = (now(device) - started) / step_count
    tokens = int(lengths.sum())
    fsdp, model = resolved(TrainerConfig().fsdp, torch.device(device)), ModelShape.of(shape)
    if device == "cuda":
        # Passes that fit are not computed again, and these do.
        fsdp = fsdp.model_copy(update={"checkpointing": False})
    expected = StepMemory.of(model, fsdp, tokens=pass_tokens)
    flops = sum(each * _flops_per_token(model, each) for each in lengths.tolist())
    rate = next((each for name, each in _RATES.items() if name in _name(device)), None)
    return {
        "tokens_per_s": round(tokens / seconds),
        "step_s": round(seconds, 4),
        "first_step_s": round(started - before, 4),
        "mfu": round(flops / seconds / rate, 4) if rate else "skipped: no data sheet of the device",
        "loss": metrics["train/loss"],
        "expected_gib": round(expected.total / 2**30, 2),
        "peak_gib": _peak_gib(device),
    }


def measure_stall(device: str) -> dict[str, Any]:
    """Return how much longer steps take when each is published, compared on host and device."""
    # That of the published recipes: bf16 rounds away most of such steps.
    engine = _engine(device, optimizer={"learning_rate": 1e-6})
    lengths = np.full(_WORK[device][0], _WORK[device][1])
    batches = [_batch(lengths, SHAPES[device]["vocab_size"], seed=seed) for seed in range(2)]
    named = dict(engine.named_parameters())
    layout = published_layout(named.items(), Dtype.BF16)
    found: dict[str, Any] = {}
    held_s = 0.0
    made: Future[Any] | None = None

    def hold() -> None:
        nonlocal held_s
        if made is not None:
            started = time.perf_counter()
            made.result()
            held_s += time.perf_counter() - started

    engine.before_change(hold)
    engine.train_step(batches[0])
    with shared_interpreter(), ThreadPoolExecutor(1) as pool:
        for name in ("alone", "device", "host"):
            made, held_s, publisher = None, 0.0, WeightPublisher(PolicyId("policy"), layout)
            publisher.copies_on_device = name == "device"
            if name != "alone":
                publisher.publish(0, named)
            step_count, started = _WORK[device][3], now(device)
            for step in range(step_count):
                if name != "alone":
                    made = pool.submit(publisher.publish, step + 1, named)
                    # As in a trainer: no step waits for it.
                    pool.submit(publisher.flush)
                engine.train_step(batches[step % 2])
            seconds = (now(device) - started) / step_count
            found[f"{name}_step_s"] = round(seconds, 4)
            if made is not None:
                found[f"{name}_held_s"] = round(held_s / step_count, 4)
                found[f"{name}_stall"] = round(seconds / found["alone_step_s"] - 1, 4)
                nbytes = min(patch.payload_nbytes for patch in made.result().patches)
                found[f"{name}_patch_share"] = round(nbytes / layout.nbytes, 4)
    return found


def measure_deterministic(device: str) -> dict[str, Any]:
    """Return the same with kernels of fixed bits."""
    return measure_trainer(device, deterministic=True)


def measure_plain(device: str) -> dict[str, Any]:
    """Return the same with blocks that are not compiled."""
    return measure_trainer(device, compiled=False)


def measure_packing(device: str) -> dict[str, Any]:
    """Return what steps on rows of ragged lengths take, packed and padded to one."""
    found: dict[str, Any] = {}
    for name, way in {"packed": "always", "padded": "never"}.items():
        found[name] = measure_trainer(device, ragged=True, packing=way)
        gc.collect()
    ratio = found["padded"]["step_s"] / found["packed"]["step_s"]
    return {**found, "padded_over_packed": round(ratio, 3)}


def measure_publish(device: str) -> dict[str, Any]:
    """Return what `device_publish.py` finds, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        sizes = ["--gb", "4"] if device == "cuda" else ["--gb", "0.002", "--versions", "2"]
        command = [sys.executable, str(_HERE / "device_publish.py"), "--json", str(found)]
        name = "cuda:0" if device == "cuda" else device
        done = subprocess.run(
            [*command, "--device", name, *sizes],
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        if done.returncode:
            raise SkippedError(done.stderr[-500:])
        return json.loads(found.read_text())


def _engine(device: str, **settings: Any) -> TorchEngine:
    given = TrainerConfig.model_validate(
        {
            "device": device,
            "max_tokens_per_pass": _WORK[device][2],
            "mismatch_every": None,
            "share_prefixes": "never",
            "thread_count": torch.get_num_threads(),
            **settings,
        }
    )
    engine = TorchEngine(given, model_dir=model_dir(device))
    engine.prepare()
    return engine


def _batch(lengths: np.ndarray, vocabulary: int, *, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    count = int(lengths.sum())
    mask = np.concatenate([np.arange(each) >= each // 4 for each in lengths])
    columns = {
        "tokens": rng.integers(3, vocabulary, count).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        "advantages": np.where(mask, rng.normal(size=count), 0).astype(np.float32),
    }
    names = [f"{seed}-{row}" for row in range(len(lengths))]
    part = BatchPart(
        batch_id=BatchId("made"),
        index=0,
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        trajectory_ids=tuple(map(TrajectoryId, names)),
        rollout_ids=tuple(map(RolloutId, names)),
        columns={
            name: Column(axis=ColumnAxis.TOKEN, values=values) for name, values in columns.items()
        },
    )
    return batch_of([part])


def _flops_per_token(shape: ModelShape, length: int) -> float:
    """Return products and sums of forward and backward, without what is computed again."""
    weights = shape.layers * shape.block_parameters + shape.vocabulary * shape.hidden
    return 6 * weights + 6 * shape.layers * shape.heads * length


def _peak_gib(device: str) -> float | str:
    if device != "cuda":
        return "skipped: the CPU's allocator keeps no count"
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


PARTS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "trainer": measure_trainer,
    "plain": measure_plain,
    "deterministic": measure_deterministic,
    "packing": measure_packing,
    "stall": measure_stall,
    "publish": measure_publish,
    "engine": measure_engine,
    "math": measure_math,
}

if __name__ == "__main__":
    sys.exit(main())
