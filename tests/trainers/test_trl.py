"""trl trains on a run; runs where trl is installed."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.testing import require_train_engine
from astraflow.trainers import run_engine
from astraflow.workflows.tutors import write_tokenizer
from tests.trainers.conftest import llama_config
from tests.trainers.engine_runs import example, training, vowel_recipe

pytest.importorskip("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def make(tmp_path):
    write_tokenizer(tmp_path / "trl-model", "abcdefghij>")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(vocab_size=128)).save_pretrained(tmp_path / "trl-model")
    recipe = example("trl_grpo")
    settings = {"learning_rate": 1e-3, "use_cpu": True}
    return lambda: recipe.TrlEngine(tmp_path / "trl-model", str(tmp_path / "trl"), **settings)


def test_it_keeps_the_contract(make, tmp_path):
    require_train_engine(make, vocabulary_size=128, folder=tmp_path / "checkpoints")


async def test_every_version_goes_live(make, tmp_path):
    engine = make()
    recipe = vowel_recipe(tmp_path, export_dtype="f32")
    async with training(partial(run_engine, engine), recipe, tmp_path) as (_, node):
        pass
    live = {key: bits.view(np.float32) for key, bits in node.engine.tensors.items()}
    for key, values in engine.named_parameters():
        assert np.array_equal(live[key], values.detach()), key
    steps = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert any(line["train/grad_norm"] for line in steps)
