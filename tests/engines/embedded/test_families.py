"""Families of transformers: each is sampled from as it computes by itself, or refused by name."""

import numpy as np
import pytest
import torch

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine

SERVED = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "falcon", "olmo", "olmo2", "olmo3"),
    *("stablelm", "starcoder2", "granite", "cohere", "cohere2", "smollm3", "glm", "glm4"),
    *("gpt_bigcode", "nemotron", "persimmon", "mixtral", "qwen3_moe", "gpt_oss"),
)
REFUSED = {
    "bloom": "model type bloom tells positions by distance",
    "mpt": "model type mpt tells positions by distance",
    "mamba": "model type mamba has layers of kind",
    "codegen": "does not compute model type codegen",
    "deepseek_v2": "does not compute model type deepseek_v2",
}


@pytest.mark.parametrize("name", SERVED)
async def test_a_family_is_sampled_from_as_transformers_computes_it(tmp_path, name, make_family):
    module = make_family(name)
    module.save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_directory(tmp_path, EngineSettings(device="cpu"), "p")
    try:
        await engine.load_directory(version=0)
        found = await engine.generate([3, 9, 4, 12, 7], SamplingParams(max_new_tokens=6, seed=1))
    finally:
        await engine.close()
    with torch.no_grad():
        tokens = torch.tensor([[3, 9, 4, 12, 7, *found.tokens]])
        logits = module(input_ids=tokens, use_cache=False).logits[0, 4:-1].float()
    # Padding and the beginning of a text are never drawn.
    logits[:, [0, 1]] = -torch.inf
    whole = logits.log_softmax(-1).gather(1, tokens[0, 5:, None])[:, 0]
    np.testing.assert_allclose(found.logprobs, whole.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_computed_is_refused_by_name(tmp_path, name, make_family):
    make_family(name).save_pretrained(tmp_path)
    with pytest.raises(AstraflowError, match=REFUSED[name]) as caught:
        EmbeddedEngine.from_directory(tmp_path, EngineSettings(device="cpu"), "p")
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_tensors_of_another_model_are_refused_by_name(tmp_path, make_family):
    make_family("gpt_neox").save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_directory(tmp_path, EngineSettings(device="cpu"), "p")
    module = make_family("gpt_neox")
    state = module.state_dict()
    state["strange.weight"] = torch.zeros(2)
    module.save_pretrained(tmp_path, state_dict=state)
    try:
        with pytest.raises(AstraflowError, match=r"strange\.weight is unexpected") as caught:
            await engine.load_directory(version=0)
    finally:
        await engine.close()
    assert caught.value.reason is Reason.APPLY_FAILED
