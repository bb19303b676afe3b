"""Minibatches and epochs: the updates of a batch against the published formulas."""

import numpy as np
import pytest
import torch

from astraflow.config.recipe import Correction, CriticConfig, Loss, Optimizer, TrainerConfig
from astraflow.core.errors import AstraflowError
from astraflow.trainers.critic import CriticLearner, valued
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.passes import minibatches_of
from astraflow.trainers.rows import TrainRows
from tests.trainers.conftest import make_row

COUNT, EPOCHS, RATE = 4, 2, 2e-2
CORRECTIONS = {
    # AReaL: a behaviour weight above the cap takes the token out.
    "decoupled": Correction(style="mask", high=3.0),
    # verl: the rollout weight is truncated.
    "TIS": Correction(high=2.0),
    "IcePop": Correction(style="mask", low=0.5, high=2.0),
    "none": None,
}


def settings_of(**fields):
    return TrainerConfig.model_validate(
        {
            "minibatches": COUNT,
            "epochs": EPOCHS,
            # A large eps: an update is a smooth function of the gradient.
            "optimizer": Optimizer(learning_rate=RATE, eps=0.1),
            "max_tokens_per_pass": 64,
            **fields,
        }
    )


@pytest.fixture
def rows(make_rows, to_part, make_model):
    """16 rows of four prompts, sampled from a policy that is not far away."""
    rng = np.random.default_rng(3)
    batch = []
    for _ in range(4):
        prompt = rng.integers(3, 14, 4)
        for _ in range(4):
            row = make_row(rng, length=int(rng.integers(7, 14)), advantage=float(rng.normal()))
            row["tokens"][:4] = prompt
            batch.append(row)
    rows = TrainRows.from_parts([to_part(batch)])
    chosen = np.ones(rows.row_count, np.bool_)
    near = PolicyLearner(make_model(), TrainerConfig()).likelihoods(rows, chosen).logprobs
    rows.loss.sampler_logprobs[:] = near + rng.normal(size=len(near)).astype(np.float32) * 0.5
    return rows


def logprobs_of(module, rows, row):
    """Return f32[k], of the loss tokens of a row, through the bare module."""
    tokens = torch.from_numpy(rows.tokens[rows.offsets[row] : rows.offsets[row + 1]]).long()
    at = torch.from_numpy(rows.loss.positions[rows.loss.rows == row] - rows.offsets[row])
    return module(input_ids=tokens[None]).logits[0].log_softmax(-1)[at - 1, tokens[at]]


def weight_of(correction, old, sampler):
    weight = torch.exp(old - sampler)
    if correction is None:
        return torch.ones_like(weight)
    if correction.style == "truncate":
        return torch.clamp(weight, max=correction.high)
    inside = (weight <= correction.high) & (weight >= correction.low)
    return torch.where(inside, weight, torch.zeros_like(weight))


def reference(module, rows, parts, correction):
    """Train by the formulas of verl and AReaL; return the loss of each update and what clipped.

    Proximal log-probabilities come once, from the policy before the batch. Per minibatch:
    sum(w max(-A r, -A clip(r))) / tokens, r = exp(logp - proximal), w from exp(proximal - sampler).
    """
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=RATE, betas=(0.9, 0.95), eps=0.1, weight_decay=0.0
    )
    loss_tokens = rows.loss
    with torch.no_grad():
        proximal = [logprobs_of(module, rows, row) for row in range(rows.row_count)]
    losses, clipped = [], []
    for part in parts:
        chosen = np.flatnonzero(part)
        count = np.isin(loss_tokens.rows, chosen).sum()
        total = torch.zeros(())
        for row in chosen:
            at = loss_tokens.rows == row
            sampler = torch.from_numpy(loss_tokens.sampler_logprobs[at])
            advantages = torch.from_numpy(loss_tokens.advantages[at])
            ratio = torch.exp(logprobs_of(module, rows, row) - proximal[row])
            plain, bounded = -advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.28)
            weight = weight_of(correction, proximal[row], sampler)
            total = total + (weight * torch.maximum(plain, bounded)).sum() / count
            clipped += (bounded > plain).tolist()
        total.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, np.mean(clipped)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_updates_are_those_of_the_published_formulas(name, make_model, rows):
    model, other = make_model(), make_model().module
    loss = Loss(old="recomputed", correction=CORRECTIONS[name])
    learner = PolicyLearner(model, settings_of(loss=loss))
    parts = list(minibatches_of(rows, count=COUNT, epochs=EPOCHS))
    metrics = learner.step(rows, divisor=len(rows.loss))
    losses, clipped = reference(other, rows, parts, CORRECTIONS[name])
    assert metrics["train/loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert metrics["train/clip_frac"] == pytest.approx(clipped, abs=1e-9)
    assert clipped > 0.02
    assert metrics["train/updates"] == COUNT * EPOCHS
    for (key, found), right in zip(
        model.module.named_parameters(), other.parameters(), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-6, msg=key)


def test_a_batch_is_one_step_however_many_updates_it_makes(make_model, rows):
    calls = []
    learner = PolicyLearner(make_model(), settings_of(), before_change=lambda: calls.append(1))
    learner.step(rows, divisor=len(rows.loss))
    assert (learner.step_count, len(calls)) == (1, 1)


def test_every_row_is_in_one_part_of_an_epoch_and_prompts_stay_together(rows):
    parts = np.array(list(minibatches_of(rows, count=COUNT, epochs=EPOCHS)))
    for epoch in np.split(parts, EPOCHS):
        assert (epoch.sum(0) == 1).all()
        assert (epoch.sum(1) == 4).all()
        assert all(len(set(np.flatnonzero(part) // 4)) == 1 for part in epoch)
    assert not np.array_equal(parts[:COUNT], parts[COUNT:])


def test_order_of_rows_and_their_ranks_do_not_change_what_is_in_a_part(make_rows, to_part):
    class Two:
        """Two ranks, of which this is one and the other has `others`."""

        def __init__(self, others):
            self.others = others

        def all_gather(self, values):
            return np.concatenate([values, self.others])

    def tokens_by_part(rows, **fields):
        found = []
        for part in minibatches_of(rows, count=3, epochs=1, **fields):
            rows_of = [rows.tokens[slice(*rows.offsets[i : i + 2])] for i in np.flatnonzero(part)]
            found.append({each.tobytes() for each in rows_of})
        return found

    batch = make_rows(18)
    whole, turned, left, right = (
        TrainRows.from_parts([to_part(some)]) for some in (batch, batch[::-1], batch[:7], batch[7:])
    )
    wanted = tokens_by_part(whole)
    assert tokens_by_part(turned) == wanted
    halves = []
    for own, others in ((left, right), (right, left)):
        caught = []
        list(minibatches_of(others, count=3, epochs=1, peers=_Catching(caught)))
        halves.append(tokens_by_part(own, peers=Two(caught[0])))
    assert [one | other for one, other in zip(*halves, strict=True)] == wanted


class _Catching:
    def __init__(self, caught):
        self.caught = caught

    def all_gather(self, values):
        self.caught.append(values)
        return values


def test_a_gradient_that_is_no_number_ends_the_batch_after_the_updates_before(make_model, rows):
    learner = PolicyLearner(make_model(), settings_of(epochs=1))
    clip, norms = learner._optimizer.clip, []

    def failing(step):
        norms.append(clip(step))
        if len(norms) == 3:
            for each in learner.trained_parameters.values():
                each.grad = torch.full_like(each, torch.nan)
            return clip(step)
        return norms[-1]

    learner._optimizer.clip = failing
    metrics = learner.step(rows, divisor=len(rows.loss))
    assert metrics["train/updates"] == 2
    assert learner.step_count == 1
    assert np.isfinite(learner.step(rows, divisor=len(rows.loss))["train/loss"])


def test_what_else_fails_between_updates_is_no_refusal_of_the_batch(make_model, rows):
    learner = PolicyLearner(make_model(), settings_of(epochs=1))
    learn, calls = learner._learn, []

    def failing(*given):
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("not enough memory")
        return learn(*given)

    learner._learn = failing
    with pytest.raises(RuntimeError, match="between two updates") as caught:
        learner.step(rows, divisor=len(rows.loss))
    assert not isinstance(caught.value, AstraflowError)


def test_a_critic_learns_in_the_same_parts(make_model, rows):
    rows.rewards[:] = np.linspace(0, 1, rows.row_count)
    settings = settings_of(critic=CriticConfig(optimizer=Optimizer(learning_rate=1e-2)))
    critic = CriticLearner(valued(make_model().module), settings.critic, max_tokens=64)
    learner = PolicyLearner(make_model(), settings, critic=critic)
    losses = [learner.step(rows, divisor=len(rows.loss))["critic/loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {int(each["step"]) for each in critic.state()["optimizer"]["state"].values()} == {40}


def test_what_a_critic_rounds_otherwise_changes_no_part(make_model, make_rows, to_part):
    rows = TrainRows.from_parts([to_part(make_rows(18))])
    for row in range(1, rows.row_count):
        # All of one prompt, which are told apart by what follows.
        rows.tokens[rows.offsets[row]] = rows.tokens[0]
    moved = []
    for max_tokens in (20, 1000):
        settings = settings_of(epochs=1, max_tokens_per_pass=max_tokens, critic=CriticConfig())
        critic = CriticLearner(valued(make_model().module), settings.critic, max_tokens=max_tokens)
        torch.manual_seed(0)
        torch.nn.init.normal_([*critic.parameters.values()][-1])
        model = make_model()
        PolicyLearner(model, settings, critic=critic).step(rows, divisor=len(rows.loss))
        moved.append([each.detach() for each in model.module.parameters()])
    for few, many in zip(*moved, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-4, atol=1e-5)
