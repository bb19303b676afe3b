"""Adapters are trained and published in place of the model."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.config.recipe import Lora, Optimizer, TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype
from astraflow.testing import require_train_engine
from astraflow.trainers.causal_model import load_causal_model
from astraflow.trainers.checkpoints import Checkpoints, start_points
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.lora import (
    AdaptedLinear,
    load_adapted_model,
    read_adapters,
    read_lora,
    trained_parameters,
)
from astraflow.trainers.mismatch import export_bits, import_bits
from astraflow.trainers.model_files import save_model, write_merged
from astraflow.trainers.origin import published_layout
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.torch_engine import TorchEngine

LORA = Lora(rank=4, alpha=8.0)
SETTINGS = TrainerConfig(optimizer=Optimizer(learning_rate=1e-2))
TOKENS = torch.tensor([[3, 9, 4, 12, 7, 7, 5]])


@pytest.fixture
def adapted(model_dir):
    def load(settings=LORA, **options):
        return load_adapted_model(model_dir, settings, device="cpu", **options)

    return load


@pytest.fixture
def rows(make_rows, to_part):
    return TrainRows.from_parts([to_part(make_rows(8))])


def scattered(module, seed=0):
    """Give adapters values of which none is 0."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in trained_parameters(module).values():
            each.copy_(torch.randn(each.shape, generator=chance) * 0.2)
    return module


def logits_of(module):
    with torch.no_grad():
        return module(input_ids=TOKENS).logits


def adapters_of(model):
    return export_bits(model.module, Dtype.F32)


def same(left, right):
    return left.keys() == right.keys() and all((bits == right[n]).all() for n, bits in left.items())


def test_fresh_adapters_change_nothing_and_are_the_same_each_time(adapted, model_dir):
    plain, model = load_causal_model(model_dir, device="cpu"), adapted()
    assert torch.equal(logits_of(plain.module), logits_of(model.module))
    assert same(adapters_of(model), adapters_of(adapted()))
    assert any(bits.any() for bits in adapters_of(model).values())


def test_gradients_are_those_of_the_merged_weights():
    """In float64: dL/dA = s B' dL/dW and dL/dB = s dL/dW A', for W' = W + s B A."""
    chance = torch.Generator().manual_seed(0)
    base = nn.Linear(6, 5, dtype=torch.float64)
    layer = scattered(AdaptedLinear(base, LORA, seed=1))
    for each in (layer.lora_A.weight, layer.lora_B.weight):
        each.data.uniform_(-1, 1, generator=chance)
    inputs = torch.randn(7, 6, generator=chance, dtype=torch.float64)
    layer(inputs).square().sum().backward()
    merged = layer.merged().requires_grad_()
    expected = nn.functional.linear(inputs, merged, base.bias)
    torch.testing.assert_close(layer(inputs), expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    scale = LORA.alpha / LORA.rank
    for found, wanted in (
        (layer.lora_A.weight.grad, scale * layer.lora_B.weight.T @ merged.grad),
        (layer.lora_B.weight.grad, scale * merged.grad @ layer.lora_A.weight.T),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_only_adapters_are_published(adapted):
    module = adapted().module
    layout = published_layout(trained_parameters(module).items(), Dtype.BF16)
    names = {spec.name for spec in layout.tensors}
    assert len(names) == 2 * 2 * 7
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert all(".lora_" in name for name in names)
    assert layout.nbytes == 2 * sum(p.numel() for p in module.parameters() if p.requires_grad)
    other = scattered(adapted().module)
    import_bits(other, export_bits(module, Dtype.F32), Dtype.F32)
    assert torch.equal(logits_of(other), logits_of(module))


def test_a_step_moves_adapters_alone(adapted, rows):
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    metrics = PolicyLearner(model, SETTINGS).step(rows, divisor=len(rows.loss))
    assert metrics["train/grad_norm"] > 0
    after = dict(model.module.named_parameters())
    moved = {name for name, old in before.items() if not torch.equal(after[name], old)}
    # The gradient of A is 0 as long as B is.
    assert moved == {name for name in before if ".lora_B." in name}


def test_targets_can_be_named(adapted):
    module = adapted(Lora(rank=2, targets=("q_proj", "down_proj"))).module
    names = {name for name, layer in module.named_modules() if isinstance(layer, AdaptedLinear)}
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "down_proj"}
    assert len(names) == 4


@pytest.mark.parametrize("target", ["c_attn", "lm_head"])
def test_a_target_that_is_not_there_is_named(adapted, target):
    with pytest.raises(AstraflowError, match=f"{target}.*it has down_proj, gate_proj") as caught:
        adapted(Lora(targets=("q_proj", target)))
    assert caught.value.reason is Reason.INVALID_FIELD


def test_training_goes_on_bit_for_bit_from_the_adapters_alone(tmp_path, model_dir, make_batch):
    def start():
        engine = TorchEngine(SETTINGS, model_dir=model_dir, lora=LORA)
        engine.prepare()
        return engine

    run_dir, engine = RunDir(tmp_path), start()
    checkpoints = Checkpoints(engine, run_dir=run_dir, policy_id="solver")
    for step in (1, 2):
        engine.train_step(make_batch(6, seed=step))
        checkpoints.save(step=step, version=step)
    metrics = engine.train_step(make_batch(6, seed=3))
    point = start_points(run_dir, "solver")[0]
    assert not (point.directory / "model.safetensors").exists()
    saved = load_file(point.directory / "adapter_model.safetensors")
    assert saved.keys() == dict(engine.named_parameters()).keys()
    again = start()
    again.restore(point.directory)
    assert again.train_step(make_batch(6, seed=3)) == metrics
    others = dict(again.named_parameters())
    assert all(torch.equal(each, others[name]) for name, each in engine.named_parameters())


@pytest.mark.slow
def test_adapters_keep_the_contract_of_engines(tmp_path, model_dir):
    require_train_engine(
        lambda: TorchEngine(SETTINGS, model_dir=model_dir, lora=LORA),
        vocabulary_size=14,
        folder=tmp_path / "checkpoints",
    )


@pytest.fixture
def saved(tmp_path, adapted, model_dir):
    """A checkpoint of adapters, and the model with them."""
    module = scattered(adapted().module)
    save_model(module, tmp_path / "adapters", companions_of=model_dir)
    return tmp_path / "adapters", module


def test_adapters_and_model_become_one_directory(tmp_path, saved, model_dir):
    directory, module = saved
    assert read_lora(directory).rank == LORA.rank
    write_merged(model_dir, directory, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), logits_of(module), rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("ba").input_ids == [1, 4, 3]


def test_adapters_of_another_rank_are_refused(adapted, saved, model_dir):
    directory, _ = saved
    with pytest.raises(AstraflowError, match="other adapters than the model") as caught:
        read_adapters(adapted(Lora(rank=2)).module, directory)
    assert caught.value.reason is Reason.INVALID_FIELD
    with pytest.raises(AstraflowError, match=r"has no adapter_config\.json"):
        read_lora(model_dir)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
def test_peft_loads_the_directory(saved, model_dir):
    peft = pytest.importorskip("peft", reason="needs astraflow[peft]")
    directory, module = saved
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_dir), directory
    )
    torch.testing.assert_close(logits_of(loaded), logits_of(module), rtol=1e-5, atol=1e-6)
    names = {name.replace(".default", "") for name in loaded.state_dict() if "lora_" in name}
    assert names == set(trained_parameters(module))


def test_numbers_do_not_depend_on_the_order_of_layers(adapted):
    some, all_of_them = adapted(Lora(rank=4, targets=("v_proj",))), adapters_of(adapted())
    for name, bits in adapters_of(some).items():
        np.testing.assert_array_equal(bits, all_of_them[name])
