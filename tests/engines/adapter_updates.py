"""Adapters with random numbers, and the updates that bring them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from astraflow.config.recipe import Lora
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate

POLICIES = {
    PolicyId("solver"): Lora(rank=4, alpha=8.0),
    PolicyId("verifier"): Lora(rank=8, alpha=8.0),
}
PROMPT = [3, 9, 4, 13]

Tensors = Mapping[str, np.ndarray]


def adapters(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Adapters of which no number is 0, f32 by name."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.2, shape).astype("f4") for name, shape in shapes.items()}


def update(
    policy: str,
    version: int,
    tensors: Tensors,
    base: int | None = None,
    indices: Sequence[int] | None = None,
) -> WeightUpdate:
    chosen = None if indices is None else np.asarray(indices)

    def part(name: str, values: np.ndarray) -> TensorUpdate:
        spec = TensorSpec(name=name, dtype=Dtype.F32, shape=values.shape, offset=0)
        bits = values.reshape(-1).view(np.uint32)
        return TensorUpdate(
            spec=spec, indices=chosen, values=bits if chosen is None else bits[chosen]
        )

    parts = tuple(part(name, values) for name, values in tensors.items())
    return WeightUpdate(
        policy_id=PolicyId(policy), version=version, base_version=base, tensors=parts
    )


def expected(model: Any, policy: str, tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities under the model with the adapters added to its weights, in float64."""
    module = model.adapted(tensors, scale=POLICIES[PolicyId(policy)].scale)
    with torch.no_grad():
        logits = module(torch.tensor([[*PROMPT, *tokens.tolist()]])).logits[0, 3:-1]
    logits[:, :2] = -torch.inf
    rows = torch.log_softmax(logits, -1)
    return rows[torch.arange(len(tokens)), torch.from_numpy(tokens).long()].numpy()


def knobs(length: int = 20, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": length, "seed": 1, "ignore_eos": True, **fields})
