"""The built-in engine keeps the contract of all engines."""

import pytest
import torch

from astraflow.config.recipe import Lora, Loss, Optimizer, TrainerConfig
from astraflow.conformance.engine_bench import weights_of
from astraflow.core.errors import CONFIGURATION_EXIT, AstraflowError
from astraflow.testing import require_train_engine
from astraflow.trainers.torch_engine import TorchEngine

SETTINGS = TrainerConfig(optimizer=Optimizer(learning_rate=1e-3, weight_decay=0.1))


@pytest.fixture
def make(model_dir):
    def make(lora=None, **fields):
        return TorchEngine(SETTINGS.model_copy(update=fields), model_dir=model_dir, lora=lora)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"loss": Loss(m2_threshold=0.04, mean="rows")}, {"lora": Lora()}],
    ids=["default", "m2po", "lora"],
)
def test_it_keeps_the_contract(make, tmp_path, fields):
    require_train_engine(
        lambda: make(**fields), vocabulary_size=14, folder=tmp_path / "checkpoints"
    )


@pytest.mark.parametrize("is_probed", [False, True])
def test_it_warns_just_before_its_weights_change(make, make_batch, is_probed):
    engine, seen = make(), []
    engine.prepare()
    if is_probed:
        engine.at_version(0)  # Rows of that version are looked at with its weights in place.
    engine.before_change(lambda: seen.append(weights_of(engine)))
    before = weights_of(engine)
    metrics = engine.train_step(make_batch(6))
    assert ("mismatch/same_weights_version" in metrics) is is_probed
    assert len(seen) == 1 + is_probed
    warned = seen[0]
    after = weights_of(engine)
    assert all((before[name] == bits).all() for name, bits in warned.items())
    assert any((before[name] != bits).any() for name, bits in after.items())


@pytest.mark.slow
def test_a_batch_too_large_for_memory_is_named_and_leaves_no_trace(model_dir, run_apart):
    with run_apart("run_out_of_memory", model_dir) as output:
        said = output.read()
    assert "MEMORY_EXCEEDED a step ran out of memory" in said
    assert "lower trainer.max_tokens_per_pass, now 1000000000" in said
    assert said.endswith("goes on\n")


@pytest.mark.parametrize(
    ("fsdp", "largest"),
    [
        ({"checkpointing": True}, 1e-6),
        ({"compute": "bf16"}, 0.03),
        ({"compute": "bf16", "checkpointing": True}, 0.03),
    ],
    ids=["recomputed", "bf16", "both"],
)
def test_one_rank_computes_as_the_recipe_says(model_dir, make_batch, fsdp, largest):
    found = []
    for fields in ({}, fsdp):
        engine = TorchEngine(
            TrainerConfig.model_validate({"device": "cpu", "fsdp": fields}), model_dir=model_dir
        )
        engine.prepare()
        found.append([engine.train_step(make_batch(8, seed=seed)) for seed in range(3)])
        assert {each.dtype for _, each in engine.named_parameters()} == {torch.float32}
    plain, other = found
    gaps = [abs(a["train/entropy"] - b["train/entropy"]) for a, b in zip(*found, strict=True)]
    assert max(gaps) < largest
    assert ("compute" in fsdp) == any(gaps)
    assert plain[0]["train/grad_norm"] == pytest.approx(other[0]["train/grad_norm"], rel=0.1)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, model_dir, make_batch):
    settings = TrainerConfig.model_validate({"device": "cpu"})
    engines = [TorchEngine(settings, model_dir=model_dir) for _ in range(2)]
    for engine in engines:
        engine.prepare()
    engine, again = engines
    engine.train_step(make_batch(6, seed=1))
    engine.save(tmp_path)
    rest = [engine.train_step(make_batch(6, seed=seed)) for seed in (2, 3)]
    engine.wait_for_save()
    again.restore(tmp_path)
    assert [again.train_step(make_batch(6, seed=seed)) for seed in (2, 3)] == rest


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_here_is_named_and_the_trainer_not_started_again(make):
    with pytest.raises(
        AstraflowError, match=r"trainer\.device is cuda, and torch sees no"
    ) as caught:
        make(device="cuda").prepare()
    assert caught.value.exit_code == CONFIGURATION_EXIT
