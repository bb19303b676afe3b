"""Modules of transformers, made one at a time.

While it makes one, transformers changes what all threads share: the method that ties an output
layer to the embeddings does nothing, and torch's default type is the module's. Of two made at
once, one may come out with weights that have no memory, or in the other's type.
"""

import threading
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

_MAKING = threading.Lock()


def read_causal_model(directory: Path, *, dtype: torch.dtype | None) -> torch.nn.Module:
    """Make the module of a Hugging Face directory, with its weights.

    Nothing is downloaded or executed.

    Args:
        directory: Where its config and weights are.
        dtype: Of all weights; None: the one that the directory names.

    Raises:
        OSError, ValueError: It is no such directory, or of an architecture that this release of
            transformers does not know.
    """
    with _MAKING:
        return cast("Any", AutoModelForCausalLM).from_pretrained(
            directory, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False
        )


def make_causal_model(config: PretrainedConfig, *, dtype: torch.dtype) -> torch.nn.Module:
    """Make the module of a config, with random weights."""
    with _MAKING:
        return cast("Any", AutoModelForCausalLM).from_config(config, dtype=dtype)
