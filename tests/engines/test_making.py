"""Models are made by any thread, at any time."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from astraflow.engines.modules import (
    FusedRMSNorm,
    fuse_norms,
    make_causal_model,
    read_causal_model,
)

THREADS = 4
CONFIG = LlamaConfig(
    vocab_size=17,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
)


@pytest.fixture
def folder(tmp_path):
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def small(kind):
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    own = {"n_embd": 32, "n_layer": 2, "n_head": 2} if kind == "gpt2" else {**sizes, **heads}
    return AutoConfig.for_model(kind, vocab_size=17, **own)


def at_once(make, count):
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda _: make(), range(count)))


def test_models_read_at_once_are_tied_and_have_their_weights(folder):
    models = at_once(lambda: read_causal_model(folder, dtype=torch.float32), 16)
    for model in models:
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        assert head.weight is embeddings.weight
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_models_made_at_once_are_of_the_types_asked_for():
    types = iter([torch.float32, torch.bfloat16] * 8)
    models = at_once(lambda: make_causal_model(CONFIG, dtype=next(types)), 16)
    found = [{parameter.dtype for parameter in model.parameters()} for model in models]
    assert found.count({torch.float32}) == found.count({torch.bfloat16}) == 8


@pytest.mark.parametrize(
    ("kind", "count"), [("llama", 5), ("qwen3", 9), ("olmo2", 9), ("gemma", 0), ("gpt2", 0)]
)
def test_norms_that_are_plain_become_one_kernel_and_say_the_same(kind, count):
    """Gemma adds one to its weights."""
    config = small(kind)
    torch.manual_seed(0)
    model = make_causal_model(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        before = model(tokens).logits
        fused = copy.deepcopy(fuse_norms(model))
        after = fused(tokens).logits
    assert sum(isinstance(each, FusedRMSNorm) for each in fused.modules()) == count
    assert [*fused.state_dict()] == [*make_causal_model(config, dtype=torch.float32).state_dict()]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_module_made_empty_takes_weights_as_any_other(kind):
    config = small(kind)
    torch.manual_seed(0)
    model = make_causal_model(config, dtype=torch.float32).eval()
    empty = make_causal_model(config, dtype=torch.float32, is_empty=True).eval()
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(torch.nan)
        empty.load_state_dict(model.state_dict())
        tokens = torch.arange(10)[None]
        assert torch.equal(empty(tokens).logits, model(tokens).logits)
