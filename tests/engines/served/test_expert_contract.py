"""New versions of a mixture of experts, in real servers: fused experts hold what was trained."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import WeightUpdate
from astraflow.engines.building import build_engine

POLICY = PolicyId("sort")
PROMPT = [3, 9, 4, 13]


@pytest.fixture
def mixture(make_model, make_mixture) -> Any:
    # Widths that vLLM's kernels for CPUs know.
    config = make_mixture(head_dim=32, moe_intermediate_size=32).config
    return make_model(config, Qwen3MoeForCausalLM)


@pytest.fixture
async def engine(request: pytest.FixtureRequest, mixture: Any) -> AsyncIterator[Any]:
    """With version 0 (seed 0) live."""
    settings = EngineSettings(kind=request.param, device="cpu", max_batch=8)
    engine: Any = build_engine(mixture.folder, settings, POLICY)
    await engine.swap(mixture.update(0, seed=0))
    yield engine
    await engine.close()


def computed(mixture: Any, update: WeightUpdate, tokens: np.ndarray) -> np.ndarray:
    """Return log-probabilities of what follows the prompt, as transformers has them."""
    module = mixture.reference(0)
    with torch.no_grad():
        for part in update.tensors:
            values = torch.from_numpy(part.values.view(np.float32).copy())
            parameter = module.get_parameter(part.spec.name)
            parameter.copy_(values.reshape(parameter.shape))
        ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
        logits = module(ids).logits[0, len(PROMPT) - 1 : -1].float()
    logits[:, :1] = -torch.inf
    return torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens.astype(int)].numpy()


async def assert_served(engine: Any, mixture: Any, update: WeightUpdate) -> None:
    knobs = SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)
    generation = await engine.generate(PROMPT, knobs)
    expected = computed(mixture, update, generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert {span.version for span in generation.version_spans} == {update.version}


@pytest.mark.parametrize(
    "engine", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True
)
async def test_experts_are_patched_where_they_lie(engine: Any, mixture: Any):
    await assert_served(engine, mixture, mixture.update(0, seed=0))
    for version in (1, 2):
        await engine.swap(mixture.sparse(version, base=version - 1))
    whole = mixture.update(0, seed=0)
    assert engine._dialect.report["nbytes"] < sum(p.values.nbytes for p in whole.tensors) / 8
    await assert_served(engine, mixture, mixture.merged([1, 2]))


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True)
async def test_experts_that_are_packed_are_loaded_whole(engine: Any, mixture: Any):
    """vLLM packs them for CPUs: a patch is refused, and nothing of it written."""
    await assert_served(engine, mixture, mixture.update(0, seed=0))
    with pytest.raises(AstraflowError, match="experts") as caught:
        await engine.swap(mixture.sparse(1, base=0))
    assert caught.value.reason is Reason.APPLY_FAILED
    await assert_served(engine, mixture, mixture.update(0, seed=0))
    merged = mixture.merged([1])
    await engine.swap(replace(merged, base_version=None))
    await assert_served(engine, mixture, merged)
