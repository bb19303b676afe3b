"""Loading a model directory."""

from pathlib import Path

import pytest
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import device_of
from astraflow.trainers.causal_model import load_causal_model, load_module
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from tests.trainers.conftest import llama_config


def test_directory_is_loaded_in_f32_with_what_is_never_sampled(model_dir):
    model = load_causal_model(model_dir, device="cpu")
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}
    assert model.never_sampled.tolist() == [0, 1]
    assert model.vocabulary_size == 14
    assert not model.module.training


def test_padding_beyond_the_models_vocabulary_is_no_token_of_it(model_dir):
    """Tokenizers get a token for it whose id the model has no embedding for."""
    (model_dir / "generation_config.json").write_text('{"pad_token_id": 14}')
    model = load_causal_model(model_dir, device="cpu")
    logprobs, _ = log_softmax_of(model, PassTokens.of_few(model))
    assert logprobs.isfinite().all()


def test_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(AstraflowError, match=str(tmp_path)) as caught:
        load_causal_model(tmp_path, device="cpu")
    assert caught.value.reason is Reason.INVALID_FIELD


def test_unknown_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(AstraflowError, match="no_such_model"):
        load_causal_model(tmp_path, device="cpu")


def test_auto_is_the_cpu_without_an_accelerator():
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_of("auto", key="trainer.device").type == wanted


def test_an_empty_model_has_all_names(tmp_path, make_model):
    whole = make_model(hidden_size=512, intermediate_size=4096, num_attention_heads=8)
    whole.module.config.save_pretrained(tmp_path)
    empty = load_module(tmp_path, device="cpu", is_empty=True)
    shapes = [
        {name: each.shape for name, each in module.named_parameters()}
        for module in (whole.module, empty)
    ]
    assert shapes[0] == shapes[1]
    assert empty.get_output_embeddings().weight is empty.get_input_embeddings().weight
    inverse = [dict(each.named_buffers()) for each in (whole.module, empty)]
    assert all(torch.equal(inverse[0][name], inverse[1][name]) for name in inverse[0])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_an_empty_model_takes_no_memory(tmp_path, run_apart):
    sizes = {"small": 16, "large": 1024}
    for name, size in sizes.items():
        config = llama_config(hidden_size=size, intermediate_size=4 * size, num_attention_heads=4)
        config.save_pretrained(tmp_path / name)
    # In a process of its own: what other tests let go of would be taken up again.
    with run_apart("load_empty", *(tmp_path / name for name in sizes)) as said:
        nbytes, grown = map(int, said.read().split())
    assert grown < nbytes / 4
