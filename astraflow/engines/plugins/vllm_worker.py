"""What vLLM's workers load: their part of an update.

vLLM imports this module in every worker before the model is made; `/collective_rpc` and
`vllm_routes` reach the methods of `AstraflowWorker`.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import vllm._custom_ops as custom_ops

from .exchange import Update
from .stager import Stager, load_by_name, stager_of

_IS_CPU = not torch.accelerator.is_available()

if _IS_CPU:
    # oneDNN packs weights and leaves empty tensors in their place: nothing to patch.
    custom_ops._supports_onednn = False  # noqa: SLF001


class AstraflowWorker:
    """What is added to every worker; `self.model_runner` is vLLM's."""

    model_runner: Any

    def astraflow_stage(self, path: str) -> dict[str, Any]:
        """Begin to look up what a file writes, beside generation."""
        self._stager().begin(path)
        return {}

    def astraflow_staged(self, path: str) -> dict[str, Any]:
        """Return how far that is."""
        return self._stager().progress(path)

    def astraflow_apply(self, path: str) -> dict[str, Any]:
        """Write a file into the live weights, and return what that did."""
        return self._stager().apply(path)

    def _stager(self) -> Stager:
        model = self.model_runner.get_model()
        return stager_of(model, partial(_reload, model, self.model_runner.model_config))


def _reload(model: Any, model_config: Any, update: Update) -> None:
    """Load all tensors as vLLM loads a checkpoint: it quantises and packs them anew."""
    from vllm.model_executor.model_loader.reload.layerwise import (  # noqa: PLC0415 - heavy
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    for module in model.modules() if _IS_CPU else ():
        if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
            # For CPUs experts are packed as their kernel is made, and not again with a kernel.
            module.quant_method.moe_kernel = None
    initialize_layerwise_reload(model)
    load_by_name(model, update)
    finalize_layerwise_reload(model, model_config)
