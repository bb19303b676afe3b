"""The model that all parts share: random weights of one shape, written once."""

import atexit
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from transformers import Qwen3Config

from astraflow.engines.modules import make_causal_model
from astraflow.trainers.tensors import seed_everything

# Qwen3-1.7B, and what a CPU can compute in seconds.
SHAPES: Final = {
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


class SkippedError(Exception):
    """Why a part cannot run here."""


@cache
def model_dir(device: str) -> Path:
    """Return the Hugging Face directory of the model for a device; it is gone when we end."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    seed_everything(0)
    config = Qwen3Config(**SHAPES[device], max_position_embeddings=4096)
    with torch.device(device):
        module: Any = make_causal_model(config, dtype=torch.bfloat16)
    module.save_pretrained(folder.name)
    (Path(folder.name) / "generation_config.json").unlink(missing_ok=True)
    return Path(folder.name)


def now(device: str) -> float:
    """Return the clock's seconds once the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def copy_rate(device: str) -> float:
    """Return the bytes per second that a copy within the device's memory reads and writes."""
    nbytes = 1 << (30 if device == "cuda" else 26)
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    for _ in range(5):
        started = now(device)
        target.copy_(source)
        seconds.append(now(device) - started)
    return 2 * source.numel() / min(seconds)
