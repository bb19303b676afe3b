"""The loss of a warm-up is that of trl's SFTTrainer; runs where trl is installed."""

import json
import random
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.config.recipe import ModelConfig
from astraflow.engines.models import models_dir
from astraflow.trainers.demonstrations import tokenize_demonstrations
from astraflow.trainers.supervised import Schedule, pack_rows, supervised_learner
from astraflow.trainers.warm_up import ensure_model

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# What each model's template writes, with trl's marks around what the assistant says.
MARKED = (
    "{% for message in messages %}{% if loop.first and default and message.role != 'system' %}"
    "{{ '<|im_start|>system\n' + default + '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
BATCH = 4


def chats():
    rng = random.Random(0)
    for _ in range(12):
        messages = []
        for _ in range(rng.randint(1, 3)):
            a, b = rng.randint(1, 60), rng.randint(1, 60)
            messages += [
                {"role": "user", "content": f"What is {a} + {b}?\nAnswer briefly."},
                {"role": "assistant", "content": f"{a} + {b} = {a + b}"},
            ]
        yield {"messages": messages}


def completions():
    rng = random.Random(1)
    for _ in range(12):
        a, b = rng.randint(1, 60), rng.randint(1, 60)
        yield {"prompt": f"3 + 4 = 7\n{a} + {b} =", "completion": f" {a + b}"}


def tiny(tmp_path):
    path = tmp_path / "demos.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*chats(), *completions()]))
    warm_up = {"demonstrations": path, "step_count": 5, "batch_size": 8}
    model = ModelConfig.model_validate({"tiny": {}, "warm_up": warm_up})
    return ensure_model(model, seed=0, cache_dir=tmp_path / "cache"), ""


def smollm2(_):
    folder = models_dir() / "smollm2-135m"
    if not folder.is_dir():
        pytest.skip("`astraflow models get smollm2-135m` was not called here")
    return folder, SMOLLM2_SYSTEM


@pytest.mark.parametrize("make", [tiny, smollm2])
@pytest.mark.parametrize("demonstrations", [chats, completions])
def test_the_loss_of_every_batch_is_the_same(make, demonstrations, tmp_path):
    folder, system = make(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = MARKED.replace(
        "{% for", "{% set default = '" + system + "' %}{% for", 1
    )
    rows = list(demonstrations())
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=BATCH,
            assistant_only_loss=demonstrations is chats,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
        ),
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(
        trainer.train_dataset
    )
    schedule = Schedule(step_count=1, batch_size=BATCH, learning_rate=1e-3)
    ours = supervised_learner(AutoModelForCausalLM.from_pretrained(folder), schedule)
    made = tokenize_demonstrations(rows, folder, max_length=1024)
    for number, inputs in enumerate(trainer.get_train_dataloader()):
        with torch.no_grad():
            theirs = float(trainer.compute_loss(trainer.model, inputs))
        batch = pack_rows(made[number * BATCH :][:BATCH])
        said = ours.likelihoods(batch, np.ones(BATCH, np.bool_))
        loss = -float(said.logprobs.mean(dtype=np.float64))
        # With `pytest -s`: the figures.
        sys.stdout.write(f"trl {theirs:.7f}, here {loss:.7f}, apart by {abs(theirs - loss):.1e}\n")
        assert loss == pytest.approx(theirs, abs=5e-6)
    assert number == len(rows) // BATCH - 1
