"""Low-rank adapters in a recipe, and as the files of peft describe them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from astraflow.config.strict import Count, Finite, Strict
from astraflow.core.errors import AstraflowError, Reason

# The files of an adapter, and how its tensors are called in them (peft 0.21).
CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


class Lora(Strict):
    """Adapters beside linear layers are trained and published in place of the model.

    This is LoRA (arXiv 2106.09685). Policies that start from the same model share one engine on a
    node: its weights are there once.
    """

    rank: Count = Field(default=16, ge=1)
    """Width of an adapter."""
    alpha: Finite = Field(default=32.0, gt=0)
    """What an adapter adds counts alpha / rank times."""
    targets: tuple[str, ...] = ()
    """Linear layers that get one, by the last part of their names, such as q_proj; empty: all but
    the output layer."""

    @property
    def scale(self) -> float:
        """What the adapters' outputs are multiplied by."""
        return self.alpha / self.rank

    def as_peft(self, *, base: str, targets: tuple[str, ...]) -> Mapping[str, Any]:
        """Return the `adapter_config.json` that peft reads.

        Args:
            base: Model that the adapters belong to.
            targets: Layers that have one, by the last part of their names.
        """
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }


def tensor_name(parameter: str) -> str:
    """Return what an adapter's tensor is called in files and in versions.

    Example:
        >>> tensor_name("model.layers.0.mlp.up_proj.lora_A.weight")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return _PREFIX + parameter


def base_of(directory: Path) -> Path:
    """Return the model that the adapters in a directory belong to; itself, if it has none."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return directory
    return Path(json.loads(path.read_text())["base_model_name_or_path"])


def last_name(path: str) -> str:
    """Return the last part of a path.

    Example:
        >>> last_name("model.layers.0.mlp.up_proj")
        'up_proj'
    """
    return path.rpartition(".")[2]


def is_target(path: str, settings: Lora) -> bool:
    """Whether a linear layer gets an adapter."""
    return not settings.targets or last_name(path) in settings.targets


def require_targets(settings: Lora, paths: Iterable[str], *, of: str) -> None:
    """Refuse targets that are no linear layers of a model, and a model that has none.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    known = {last_name(path) for path in paths}
    missing = set(settings.targets) - known
    if missing or not known:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.targets: {of} has no linear layer {', '.join(sorted(missing))} to "
            f"adapt; it has {', '.join(sorted(known)) or 'none'}",
        )
