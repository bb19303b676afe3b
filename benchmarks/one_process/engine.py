"""The embedded engine, given the present weights of a model before each batch."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorUpdate, WeightUpdate
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.lora import trained_parameters
from astraflow.trainers.mismatch import export_bits
from astraflow.trainers.origin import published_layout
from one_process.samples import Samples

_POLICY = PolicyId("solver")


class EngineSampler:
    """Samples with the weights of a model as they are; the same seed draws the same."""

    def __init__(
        self, directory: Path, model: CausalModel, *, max_new_tokens: int, batch: int, seed: int
    ) -> None:
        settings = EngineSettings(max_batch=batch, device="cpu", dtype="f32", thread_count=1)
        self._engine = EmbeddedEngine.from_directory(directory, settings, _POLICY)
        self._module = model.module
        self._layout = published_layout(trained_parameters(model.module).items(), Dtype.F32)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._max_new_tokens = max_new_tokens
        self._rng = np.random.default_rng(seed)

    async def take(self, version: int) -> None:
        """Sample from the present weights from now on."""
        bits = export_bits(self._module, Dtype.F32)
        tensors = (
            TensorUpdate(spec=spec, indices=None, values=bits[spec.name].reshape(-1))
            for spec in self._layout.tensors
        )
        await self._engine.swap(
            WeightUpdate(
                policy_id=_POLICY, version=version, base_version=None, tensors=tuple(tensors)
            )
        )

    async def sample(self, prompts: Sequence[str]) -> Samples:
        """Sample one completion of each prompt, at temperature 1."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(prompts))]
        seeds = self._rng.integers(0, 1 << 62, len(ids)).tolist()
        made = await asyncio.gather(
            *(
                self._engine.generate(
                    row, SamplingParams(max_new_tokens=self._max_new_tokens, seed=seed)
                )
                for row, seed in zip(ids, seeds, strict=True)
            )
        )
        return Samples(
            prompts=ids,
            completions=[each.tokens for each in made],
            logprobs=[each.logprobs for each in made],
        )

    def text(self, completion: np.ndarray) -> str:
        """Return a completion without special tokens."""
        return str(self._tokenizer.decode(completion.tolist(), skip_special_tokens=True))

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()
