"""What a GPU makes of the trainer and of publishing, in minutes; the same code runs on a CPU.

    python benchmarks/gpu --json gpu.json
    python benchmarks/gpu --device cpu

`trainer`: steps of the built-in engine on a model of random weights with the shape of Qwen3-1.7B,
with a GPU's defaults: tokens per second, model FLOP utilisation (6 operations per weight and token,
embeddings left out, and half of the square of attention, against the bf16 rate of the data sheet),
the most memory at once, and what `StepMemory` says of it. `deterministic`: the same with kernels of
fixed bits. `packing`: the same on rows of ragged lengths, packed and padded, in one run. `publish`:
`device_publish.py`, bytes compared per second against a copy in the device's memory, and what steps
beside it take longer. A part that cannot run says why, and the others go on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import Qwen3Config

from astraflow.config.policies import TrainerConfig
from astraflow.conformance.engine_bench import batch_of
from astraflow.core.batches import BatchPart
from astraflow.core.ids import BatchId, RolloutId, TrajectoryId
from astraflow.core.rollouts import Column, ColumnAxis
from astraflow.engines.modules import make_causal_model
from astraflow.trainers.blocks import resolved
from astraflow.trainers.memory import ModelShape, StepMemory
from astraflow.trainers.tensors import seed_everything
from astraflow.trainers.torch_engine import TorchEngine

_HERE: Final = Path(__file__).parent.parent

# bf16 products without sparsity, per second: NVIDIA's data sheets.
_RATES: Final = {"H100": 989e12, "H200": 989e12, "A100": 312e12}

_SHAPES: Final = {
    "cuda": {
        "num_hidden_layers": 28,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "cpu": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
}
# Rows of a batch, tokens of a row, tokens of a pass, steps that are measured.
_WORK: Final = {"cuda": (32, 2048, 8192, 5), "cpu": (4, 64, 128, 2)}


class SkippedError(Exception):
    """Why a part cannot run here."""


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
    device: str, *, deterministic: bool = False, ragged: bool = False, packing: str = "auto"
) -> dict[str, Any]:
    """Return tokens per second of steps, and their memory.

    Args:
        device: By name.
        deterministic: Whether kernels are of fixed bits.
        ragged: Whether rows are of any length, up to twice that of others.
        packing: Of the recipe.
    """
    row_count, length, pass_tokens, step_count = _WORK[device]
    lengths = np.full(row_count, length)
    if ragged:
        lengths = np.linspace(length // 16, 2 * length - length // 16, row_count).astype(np.int64)
    shape = _SHAPES[device]
    settings = TrainerConfig.model_validate(
        {
            "device": device,
            "max_tokens_per_pass": pass_tokens,
            "mismatch_every": None,
            "share_prefixes": "never",
            "packing": packing,
            "deterministic": deterministic,
            "thread_count": torch.get_num_threads(),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), shape)
        engine = TorchEngine(settings, model_dir=Path(folder))
        engine.prepare()
    batches = [_batch(lengths, shape["vocab_size"], seed=seed) for seed in range(2)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    metrics = engine.train_step(batches[0])
    started = _now(device)
    for step in range(step_count):
        metrics = engine.train_step(batches[step % 2])
    seconds = (_now(device) - started) / step_count
    tokens = int(lengths.sum())
    fsdp = resolved(settings.fsdp, torch.device(device))
    model = ModelShape.of(shape)
    expected = StepMemory.of(model, fsdp, tokens=pass_tokens)
    flops = sum(each * _flops_per_token(model, each) for each in lengths.tolist())
    rate = next((each for name, each in _RATES.items() if name in _name(device)), None)
    return {
        "tokens_per_s": round(tokens / seconds),
        "step_s": round(seconds, 4),
        "mfu": round(flops / seconds / rate, 4) if rate else "skipped: no data sheet of the device",
        "loss": metrics["train/loss"],
        "expected_gib": round(expected.total / 2**30, 2),
        "peak_gib": _peak_gib(device),
    }


def measure_deterministic(device: str) -> dict[str, Any]:
    """Return the same with kernels of fixed bits."""
    return measure_trainer(device, deterministic=True)


def measure_packing(device: str) -> dict[str, Any]:
    """Return what steps on rows of ragged lengths take, packed and padded to one."""
    ways = {"packed": "always", "padded": "never"}
    found = {name: measure_trainer(device, ragged=True, packing=way) for name, way in ways.items()}
    ratio = found["padded"]["step_s"] / found["packed"]["step_s"]
    return {**found, "padded_over_packed": round(ratio, 3)}


def measure_publish(device: str) -> dict[str, Any]:
    """Return what `device_publish.py` finds, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        sizes = ["--gb", "4"] if device == "cuda" else ["--gb", "0.05", "--versions", "2"]
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


def _write_model(folder: Path, shape: dict[str, Any]) -> None:
    seed_everything(0)
    config = Qwen3Config(**shape, max_position_embeddings=4096)
    module: Any = make_causal_model(config, dtype=torch.bfloat16)
    module.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


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


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_gib(device: str) -> float | str:
    if device != "cuda":
        return "skipped: the CPU's allocator keeps no count"
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


PARTS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "trainer": measure_trainer,
    "deterministic": measure_deterministic,
    "packing": measure_packing,
    "publish": measure_publish,
}

if __name__ == "__main__":
    sys.exit(main())
