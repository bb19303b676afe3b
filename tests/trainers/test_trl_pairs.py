"""Losses of pairs are those of trl's DPOTrainer and RewardTrainer; runs where trl is installed."""

import random
import sys

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from astraflow.config.recipe import Loss, Optimizer, TrainerConfig
from astraflow.trainers.causal_model import CausalModel, load_causal_model
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.rows import TrainRows
from astraflow.workflows.tutors import write_tokenizer
from tests.trainers.conftest import UNCLIPPED, llama_config, seen_gradients, to_part

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

COUNT = 8
CLOSE = 1e-6
LETTERS = "abcdefghij"
SAME = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": []}


def pairs(**fields):
    rng = random.Random(0)

    def words(least, most):
        return "".join(rng.choice(LETTERS) for _ in range(rng.randint(least, most)))

    return [
        {"prompt": words(2, 6), "chosen": words(1, 9), "rejected": words(1, 9), **fields}
        for _ in range(COUNT)
    ]


def saved(folder, model_class, *, seed, **fields):
    write_tokenizer(folder, LETTERS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    config = llama_config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **fields,
    )
    model_class(config).save_pretrained(folder)
    return folder


def first_batch(trainer):
    """Return the loss and the gradients of all pairs, and what they were."""
    inputs = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    named = trainer.model.named_parameters()
    return inputs, loss.item(), {name: each.grad for name, each in named}


def rows_of(inputs, completion_mask):
    """Return the rows of a batch whose first half was preferred, row by row, to its second."""
    rows = []
    for index, tokens in enumerate(inputs["input_ids"]):
        length = int(inputs["attention_mask"][index].sum())
        rows.append(
            {
                "tokens": tokens[:length].numpy().astype(np.int32),
                "loss_mask": completion_mask[index, :length].numpy().astype(np.bool_),
                "logprobs": np.zeros(length, np.float32),
                "advantages": np.zeros(length, np.float32),
                "temperature": 1.0,
                "reward": float(index < COUNT),
                "version": 0,
                "group": index % COUNT,
            }
        )
    return TrainRows.from_parts([to_part(rows)])


def after_the_first(mask):
    """Return a mask without the first token, which nothing predicts."""
    return mask * (torch.arange(mask.shape[1]) > 0)


def learned(model, rows, loss, **others):
    """Return the loss and the gradients that one step adds up."""
    config = TrainerConfig(
        loss=Loss.model_validate(loss),
        optimizer=Optimizer(max_grad_norm=UNCLIPPED),
        max_tokens_per_pass=40,
    )
    learner = PolicyLearner(model, config, **others)
    with seen_gradients(model.module) as seen:
        metrics = learner.step(rows, divisor=len(rows.loss))
    return metrics["train/loss"], seen[0]


def require_same(what, theirs, ours):
    (loss, gradients), (own_loss, own_gradients) = theirs, ours
    assert own_gradients.keys() == gradients.keys()
    apart = max(float((own_gradients[name] - gradients[name]).abs().max()) for name in gradients)
    largest = max(float(each.abs().max()) for each in gradients.values())
    # With `pytest -s`: the figures.
    sys.stdout.write(
        f"{what}: trl {loss:.7f}, here {own_loss:.7f}, apart by {abs(loss - own_loss):.1e}, "
        f"gradients, up to {largest:.2f}, by {apart:.1e}\n"
    )
    assert own_loss == pytest.approx(loss, abs=CLOSE)
    assert apart <= 1e-5 * largest
    assert largest > 100 * CLOSE


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_is_that_of_trl(beta, tmp_path):
    folder = saved(tmp_path / "policy", LlamaForCausalLM, seed=0)
    before = saved(tmp_path / "reference", LlamaForCausalLM, seed=1)
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=datasets.Dataset.from_list(pairs()),
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=COUNT,
            beta=beta,
            **SAME,
        ),
    )
    inputs, *theirs = first_batch(trainer)
    ours = learned(
        CausalModel(AutoModelForCausalLM.from_pretrained(folder)),
        rows_of(inputs, inputs["completion_mask"]),
        {"surrogate": "dpo", "pairs": {"beta": beta}},
        reference=CausalModel(AutoModelForCausalLM.from_pretrained(before)),
    )
    require_same(f"DPO, beta {beta}", theirs, ours)


@pytest.mark.parametrize("margin", [0.0, 0.7])
def test_a_reward_model_is_that_of_trl(margin, tmp_path):
    folder = saved(tmp_path / "judge", LlamaForSequenceClassification, seed=2, num_labels=1)
    trainer = trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        train_dataset=datasets.Dataset.from_list(pairs(**{"margin": margin} if margin else {})),
        args=trl.RewardConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=COUNT,
            **SAME,
        ),
    )
    inputs, *theirs = first_batch(trainer)
    ours = learned(
        load_causal_model(folder, device="cpu", makes_scores=True),
        rows_of(inputs, after_the_first(inputs["attention_mask"])),
        {"surrogate": "bradley_terry", "pairs": {"margin": margin}},
    )
    require_same(f"Bradley-Terry, margin {margin}", theirs, ours)
