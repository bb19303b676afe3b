"""Losses of pairs against plain loops of torch, and transformers' own reward models."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from astraflow.config.recipe import Loss, Optimizer, TrainerConfig
from astraflow.core.errors import AstraflowError
from astraflow.trainers.causal_model import load_causal_model
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.pairs import compare
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.torch_engine import TorchEngine
from tests.trainers.conftest import UNCLIPPED, make_row, seen_gradients, to_part

PAIRS = {"beta": 0.3, "label_smoothing": 0.1, "margin": 0.2}


def pair_rows(count, *, seed=0):
    """Return rows of groups: the first of each is preferred to the others, one or two."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(count):
        prompt = rng.integers(3, 14, 4).astype(np.int32)
        for place in range(2 + group % 2):
            row = make_row(rng, prompt=4, length=int(rng.integers(6, 12)))
            row["tokens"][:4] = prompt
            rows.append({**row, "reward": 1.0 if place == 0 else 0.5 * (place - 1), "group": group})
    order = rng.permutation(len(rows))
    return TrainRows.from_parts([to_part([rows[index] for index in order])])


def settings(surrogate, **fields):
    loss = Loss.model_validate({"surrogate": surrogate, "pairs": PAIRS})
    optimizer = Optimizer(learning_rate=1e-2, max_grad_norm=UNCLIPPED)
    return TrainerConfig(loss=loss, optimizer=optimizer, max_tokens_per_pass=40, **fields)


def learned(model, rows, config, **others):
    """Return the gradient that one step adds up, and its numbers."""
    learner = PolicyLearner(model, config, **others)
    with seen_gradients(model.module) as seen:
        metrics = learner.step(rows, divisor=len(rows.loss))
    return seen[0], metrics


def row_tokens(rows, row):
    return torch.from_numpy(rows.tokens[rows.offsets[row] : rows.offsets[row + 1]].astype(np.int64))


def logprob(module, rows, row):
    tokens, at = row_tokens(rows, row), rows.loss.positions[rows.loss.rows == row]
    at = torch.from_numpy(at - rows.offsets[row])
    said = module(input_ids=tokens[None]).logits[0].log_softmax(-1)
    return said[at - 1, tokens[at]].sum()


def plain_loss(values, rows):
    """Return the mean over pairs, each of which is looked at by itself."""
    losses = []
    for one in range(rows.row_count):
        for other in range(rows.row_count):
            gap = float(rows.rewards[one] - rows.rewards[other])
            if rows.compared_with[one] != rows.compared_with[other] or gap <= 0:
                continue
            z = values[one] - values[other] - PAIRS["margin"] * gap
            smoothing = PAIRS["label_smoothing"]
            right, wrong = functional.logsigmoid(z), functional.logsigmoid(-z)
            losses.append(-(1 - smoothing) * right - smoothing * wrong)
    return torch.stack(losses).mean()


def test_dpo_is_that_of_a_plain_loop_over_pairs(make_model):
    rows, reference = pair_rows(6), make_model(initializer_range=0.2)
    found, metrics = learned(make_model(), rows, settings("dpo"), reference=reference)
    module = make_model().module
    with torch.no_grad():
        before = [logprob(reference.module, rows, row) for row in range(rows.row_count)]
    values = [
        PAIRS["beta"] * (logprob(module, rows, row) - before[row]) for row in range(rows.row_count)
    ]
    loss = plain_loss(values, rows)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_reward_model_is_that_of_transformers(model_dir):
    rows = pair_rows(6, seed=1)
    model = load_causal_model(model_dir, device="cpu", makes_scores=True)
    plain = AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=1)
    plain.load_state_dict(model.module.state_dict())
    found, metrics = learned(model, rows, settings("bradley_terry"))
    values = [plain(row_tokens(rows, row)[None]).logits[0, 0] for row in range(rows.row_count)]
    loss = plain_loss(values, rows)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("surrogate", ["dpo", "bradley_terry"])
def test_a_row_without_a_loss_token_is_compared_with_none(model_dir, make_model, surrogate):
    """As rollouts of the filter `truncated` with `action: mask`."""
    rows = pair_rows(6, seed=2)
    is_masked = np.arange(rows.row_count) % 5 == 0
    # Those of a group of their own are compared with none, either.
    apart = (1000 + is_masked.cumsum()).astype(np.uint64) << np.uint64(32)
    batches = [
        replace(rows, loss=rows.loss.where(~is_masked[rows.loss.rows])),
        replace(rows, compared_with=np.where(is_masked, apart, rows.compared_with)),
    ]
    scores = surrogate == "bradley_terry"
    found = [
        learned(
            load_causal_model(model_dir, device="cpu", makes_scores=scores),
            batch,
            settings(surrogate),
            reference=None if scores else make_model(initializer_range=0.2),
        )
        for batch in batches
    ]
    assert found[0][1]["train/loss"] == pytest.approx(found[1][1]["train/loss"], abs=1e-6)
    for name, gradient in found[1][0].items():
        torch.testing.assert_close(found[0][0][name], gradient, rtol=1e-4, atol=1e-6)


def test_numbers_of_pairs_are_means_over_pairs():
    rows = pair_rows(1)
    rows = replace(rows, rewards=np.array([1.0, 0.0], np.float32))
    values = np.array([0.25, -0.5])
    slopes, metrics = compare(values, rows, Loss().pairs)
    assert metrics["pairs/lead"] == 0.75
    assert metrics["pairs/accuracy"] == 1
    assert (metrics["pairs/chosen"], metrics["pairs/rejected"]) == (0.25, -0.5)
    assert metrics["train/loss"] == pytest.approx(np.log1p(np.exp(-0.75)))
    slope = 1 / (1 + np.exp(0.75))
    np.testing.assert_allclose(slopes, [-slope, slope])


def test_groups_without_a_difference_move_nothing(make_model):
    rows = pair_rows(3)
    same = replace(rows, rewards=np.ones_like(rows.rewards))
    model, before = make_model(), make_model()
    learner = PolicyLearner(model, settings("dpo"), reference=make_model())
    assert learner.step(same, divisor=1.0)["train/grad_norm"] == 0
    assert learner.step_count == 1
    for name, parameter in before.module.named_parameters():
        assert torch.equal(parameter, model.module.get_parameter(name))
    alone = replace(rows, compared_with=np.full_like(rows.compared_with, 0xFFFFFFFF << 32))
    with pytest.raises(AstraflowError, match="group_index"):
        learner.step(alone, divisor=1.0)


@pytest.mark.parametrize("surrogate", ["dpo", "bradley_terry"])
def test_pairs_are_told_apart_after_some_steps(model_dir, make_model, surrogate):
    config = settings(surrogate)
    scores = surrogate == "bradley_terry"
    model = load_causal_model(model_dir, device="cpu", makes_scores=scores)
    learner = PolicyLearner(model, config, reference=None if scores else make_model())
    rows = pair_rows(8, seed=3)
    metrics = [learner.step(rows, divisor=1.0) for _ in range(20)]
    assert metrics[0]["pairs/accuracy"] < 0.8
    assert metrics[-1]["pairs/accuracy"] == 1
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]


def test_a_reward_model_is_saved_as_transformers_loads_it(model_dir, make_batch, tmp_path):
    config = settings("bradley_terry")
    engine = TorchEngine(config, model_dir=model_dir)
    engine.prepare()
    assert "score.weight" in dict(engine.named_parameters())
    batch = make_batch(6)
    for number, row in enumerate(batch.parts[0].columns["group_index"].values):
        assert row == -1
        batch.parts[0].columns["group_index"].values[number] = number // 2
        batch.parts[0].columns["rewards"].values[number] = number % 2
    engine.train_step(batch)
    engine.save(tmp_path)
    engine.wait_for_save()
    next_step = engine.train_step(batch)
    found, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(info[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    assert found.config.architectures == ["LlamaForSequenceClassification"]
    engine.restore(tmp_path)
    assert engine.train_step(batch) == next_step


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"loss": {"surrogate": "dpo", "kl": {"coefficient": 0.1}}}, "kl"),
        ({"loss": {"surrogate": "dpo", "mean": "rows"}}, "mean over pairs"),
        ({"loss": {"surrogate": "dpo"}, "minibatches": 2}, "minibatches: 1"),
        ({"loss": {"surrogate": "bradley_terry"}, "critic": {}}, "critic"),
    ],
)
def test_what_means_nothing_to_pairs_is_refused(fields, match):
    with pytest.raises(ValidationError, match=match):
        TrainerConfig.model_validate(fields)
