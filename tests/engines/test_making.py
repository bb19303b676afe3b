"""Models are made by any thread, at any time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.engines.modules import make_causal_model, read_causal_model

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
