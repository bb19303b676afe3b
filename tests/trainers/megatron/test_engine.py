"""The Megatron adapter trains as transformers does; runs where megatron-core is installed."""

import importlib.util

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from astraflow.config.recipe import TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing import require_train_engine
from astraflow.trainers.causal_model import load_causal_model
from astraflow.trainers.megatron.engine import MegatronEngine
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.workflows.tutors import write_tokenizer
from tests.trainers.conftest import VOCABULARY, llama_config, make_rows, to_batch, to_part

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
megatron = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not HAS_MEGATRON, reason="needs astraflow[megatron]"),
]
SETTINGS = TrainerConfig.model_validate({"optimizer": {"learning_rate": 1e-3}})
KINDS = {
    "llama": {},
    "llama-gqa-untied": {"num_attention_heads": 4, "num_key_value_heads": 2, "tied": False},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}


def write_random_model(folder, kind):
    """Write a tiny model with random weights, biases and norms too."""
    fields = {**llama_config().to_dict(), **KINDS[kind]}
    tied = fields.pop("tied", True)
    fields = {key: fields[key] for key in fields if key not in ("model_type", "architectures")}
    if "head_dim" not in KINDS[kind]:
        fields.pop("head_dim", None)
    config = AutoConfig.for_model(kind.split("-")[0], **{**fields, "tie_word_embeddings": tied})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    write_tokenizer(folder, "abcdefghij>")
    module.save_pretrained(folder)
    return folder


@pytest.fixture(params=KINDS)
def any_model(request, tmp_path):
    return write_random_model(tmp_path / "model", request.param)


def prepared(make, folder):
    engine = make(SETTINGS, model_dir=folder)
    engine.prepare()
    return engine


class TestWithMegatron:
    pytestmark = megatron

    def test_it_says_what_transformers_says(self, any_model):
        tokens = torch.randint(3, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(1))
        theirs = load_causal_model(any_model, device="cpu").module
        ours = prepared(MegatronEngine, any_model)._model.module
        with torch.no_grad():
            gap = (ours(tokens).logits - theirs(tokens).logits).abs().max()
        assert gap <= 1e-5

    def test_what_is_published_and_saved_is_the_checkpoint(self, any_model, tmp_path):
        engine = prepared(MegatronEngine, any_model)
        wanted = dict(load_causal_model(any_model, device="cpu").module.named_parameters())
        found = dict(engine.named_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        engine.train_step(to_batch([to_part(make_rows(6))]))
        (tmp_path / "saved").mkdir()
        engine.save(tmp_path / "saved")
        saved = dict(load_causal_model(tmp_path / "saved", device="cpu").module.named_parameters())
        found = dict(engine.named_parameters())
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        assert any(not torch.equal(saved[name], wanted[name]) for name in wanted)

    def test_it_makes_the_steps_of_the_built_in_trainer(self, any_model):
        ours, theirs = (prepared(make, any_model) for make in (MegatronEngine, TorchEngine))
        for seed in range(5):
            batch = to_batch([to_part(make_rows(8, seed=seed))])
            mine, other = ours.train_step(batch), theirs.train_step(batch)
            assert mine.keys() == other.keys()
            for name in ("train/loss", "train/grad_norm"):
                assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name

    def test_it_keeps_the_contract(self, tmp_path):
        folder = write_random_model(tmp_path / "model", "qwen2")
        require_train_engine(
            lambda: MegatronEngine(SETTINGS, model_dir=folder),
            vocabulary_size=VOCABULARY,
            folder=tmp_path / "checkpoints",
        )

    def test_a_directory_without_its_weights_is_refused(self, tmp_path):
        folder = write_random_model(tmp_path / "model", "llama")
        (folder / "model.safetensors").unlink()
        with pytest.raises(AstraflowError, match="cannot be loaded into Megatron") as caught:
            prepared(MegatronEngine, folder)
        assert caught.value.reason is Reason.INVALID_FIELD


@pytest.mark.skipif(HAS_MEGATRON, reason="megatron-core is here")
def test_without_megatron_it_says_what_to_install(tmp_path):
    folder = write_random_model(tmp_path / "model", "llama")
    with pytest.raises(AstraflowError, match=r"astraflow\[megatron\]") as caught:
        prepared(MegatronEngine, folder)
    assert caught.value.reason is Reason.CAPABILITY_MISSING


def test_a_critic_is_refused(tmp_path):
    settings = TrainerConfig.model_validate({"critic": {}})
    with pytest.raises(AstraflowError, match="trains no critic") as caught:
        MegatronEngine(settings, model_dir=tmp_path)
    assert caught.value.reason is Reason.CAPABILITY_MISSING
