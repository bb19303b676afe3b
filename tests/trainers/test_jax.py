"""JAX trains on a run; runs where it is installed."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from astraflow.config.recipe import TrainerConfig
from astraflow.config.run_dir import RunDir, read_json_lines
from astraflow.testing import require_train_engine
from astraflow.trainers import run_engine
from astraflow.trainers.model_files import save_model
from astraflow.workflows.tutors import write_tokenizer
from tests.trainers.conftest import llama_config
from tests.trainers.engine_runs import example, training, vowel_recipe

pytest.importorskip("jax")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SETTINGS = TrainerConfig.model_validate({"optimizer": {"learning_rate": 1e-3}})


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", "abcdefghij>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(vocab_size=128))
    save_model(model, tmp_path / "model", companions_of=tmp_path / "tokenizer")
    return tmp_path / "model"


@pytest.fixture
def make(folder):
    recipe = example("jax_loop")
    # One module for all engines: what was compiled for one serves the others.
    return lambda: recipe.JaxLlama(SETTINGS, model_dir=folder)


def test_it_says_what_transformers_says(make, folder):
    engine = make()
    engine.prepare()
    tokens = np.random.default_rng(0).integers(3, 128, (3, 11))
    weights = dict(engine.named_parameters())
    found = np.asarray(example("jax_loop").logits(weights, tokens, engine.settings["shape"]))
    with torch.no_grad():
        wanted = LlamaForCausalLM.from_pretrained(folder)(torch.from_numpy(tokens)).logits
    assert np.abs(found - wanted.numpy()).max() <= 1e-5


def test_it_keeps_the_contract(make, tmp_path):
    require_train_engine(make, vocabulary_size=128, folder=tmp_path / "checkpoints")


async def test_every_version_goes_live(make, tmp_path):
    engine = make()
    recipe = vowel_recipe(tmp_path, export_dtype="f32")

    def train(**arguments):
        run_engine(engine, **arguments)

    async with training(train, recipe, tmp_path) as (_, node):
        pass
    live = {key: bits.view(np.float32) for key, bits in node.engine.tensors.items()}
    for key, values in engine.named_parameters():
        assert np.array_equal(live[key], values), key
    steps = read_json_lines(RunDir(tmp_path / "run").metrics)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert any(line["train/grad_norm"] for line in steps)
