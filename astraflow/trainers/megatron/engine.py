"""MegatronEngine: the built-in trainer around a GPT of megatron-core."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors
from torch import Tensor

from astraflow.config.recipe import TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.trainers.causal_model import CausalModel, never_sampled, resolve_device
from astraflow.trainers.checkpoints import OPTIMIZER_FILE
from astraflow.trainers.megatron.model import GptModule, load_gpt
from astraflow.trainers.model_files import copy_description
from astraflow.trainers.torch_engine import TorchEngine


class MegatronEngine(TorchEngine):
    """Trains a model with Megatron's blocks; a `TrainEngine`.

    Losses, passes, optimizer and metrics are those of the built-in trainer. What is published and
    saved has the names and shapes of Hugging Face, to the bit.
    """

    def __init__(self, settings: TrainerConfig, *, model_dir: Path) -> None:
        """Load nothing yet; `prepare` does.

        Args:
            settings: Of the trainer.
            model_dir: The first weights, architecture and tokenizer.

        Raises:
            AstraflowError: CAPABILITY_MISSING for settings with a critic.
        """
        if settings.critic is not None:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING,
                "the Megatron adapter trains no critic; leave out trainer.critic or trainer.engine",
            )
        super().__init__(settings, model_dir=model_dir)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights, f32, under Hugging Face's names."""
        return self._gpt.hf_tensors()

    def save(self, directory: Path) -> None:
        """Write a directory of Hugging Face, and the optimizer beside it."""
        tensors = {name: each.detach().cpu().contiguous() for name, each in self._gpt.hf_tensors()}
        path = directory / "model.safetensors"
        cast("Any", safetensors).save_file(tensors, path, metadata={"format": "pt"})
        copy_description(self._model_dir, directory)
        torch.save(self._learner.state(), directory / OPTIMIZER_FILE)

    @property
    def _gpt(self) -> GptModule:
        return cast("GptModule", self._model.module)

    def _read(self, directory: Path) -> CausalModel:
        """Load all of a model."""
        module = load_gpt(directory, resolve_device(self._settings.device))
        return CausalModel(module, never_sampled=never_sampled(directory))
