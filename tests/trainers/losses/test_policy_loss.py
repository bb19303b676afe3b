"""GRPO against plain numpy in double precision."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.config.recipe import Loss
from astraflow.trainers.losses import LossInputs, clip_range_of, loss_metrics, policy_loss
from astraflow.trainers.rows import LossTokens

SETTINGS = Loss(clip_low=0.2, clip_high=0.28)


def tokens(count=200, *, spread=0.4, seed=0):
    rng = np.random.default_rng(seed)
    old = -rng.random(count) * 4
    return {
        "logprobs": old + rng.normal(size=count) * spread,
        "old": old,
        "advantages": rng.normal(size=count),
        "weights": rng.random(count) + 0.5,
    }


def reference(t, *, token_count):
    """Return loss and gradient, f64, straight from the formula."""
    ratio = np.exp(t["logprobs"] - t["old"])
    clipped = np.clip(ratio, 0.8, 1.28)
    plain, bounded = ratio * t["advantages"], clipped * t["advantages"]
    loss = -(t["weights"] * np.minimum(plain, bounded)).sum() / token_count
    flows = (plain < bounded) | (ratio == clipped)
    return loss, -np.where(flows, t["weights"] * plain, 0) / token_count


def measured(t, *, token_count, dtype=torch.float64):
    logprobs = torch.tensor(t["logprobs"], dtype=dtype, requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        sampler_logprobs=torch.tensor(t["old"], dtype=dtype),
        advantages=torch.tensor(t["advantages"], dtype=dtype),
        weights=torch.tensor(t["weights"], dtype=dtype),
        rows=torch.zeros(len(t["old"]), dtype=torch.long),
        row_count=1,
    )
    loss = policy_loss(inputs, SETTINGS, clip_range_of(SETTINGS), divisor=token_count)
    loss.backward()
    return loss.item(), logprobs.grad.numpy()


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_formula(seed):
    t = tokens(seed=seed)
    loss, gradient = measured(t, token_count=333)
    wanted, wanted_gradient = reference(t, token_count=333)
    assert loss == pytest.approx(wanted, rel=1e-12)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-12, atol=0)


def test_single_precision_stays_close():
    loss, gradient = measured(tokens(), token_count=200, dtype=torch.float32)
    wanted, wanted_gradient = reference(tokens(), token_count=200)
    assert loss == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-9)


def test_shares_of_passes_add_up():
    t = tokens()
    halves = [{name: part[s] for name, part in t.items()} for s in (slice(70), slice(70, None))]
    whole, _ = measured(t, token_count=200)
    shares = sum(measured(half, token_count=200)[0] for half in halves)
    assert shares == pytest.approx(whole, rel=1e-12)


def test_on_policy_gradient_is_the_advantage():
    t = tokens(spread=0.0)
    _, gradient = measured(t, token_count=200)
    np.testing.assert_allclose(gradient, -t["advantages"] * t["weights"] / 200)


def test_absurd_ratio_stays_finite():
    t = {
        "logprobs": np.array([-1.0, -500.0]),
        "old": np.array([-500.0, -1.0]),
        "advantages": np.array([-1.0, 1.0]),
        "weights": np.ones(2),
    }
    loss, gradient = measured(t, token_count=2, dtype=torch.float32)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def loss_tokens(t):
    count = len(t["old"])
    return LossTokens(
        positions=np.arange(count),
        rows=np.zeros(count, np.int64),
        sampler_logprobs=t["old"].astype(np.float32),
        advantages=t["advantages"].astype(np.float32),
        weights=t["weights"].astype(np.float32),
        temperatures=np.ones(count, np.float32),
    )


def test_metrics_say_how_far_trainer_and_sampler_are_apart():
    t = tokens()
    entropies = np.full(200, 0.5, np.float32)
    metrics = loss_metrics(
        loss_tokens(t),
        logprobs=t["logprobs"].astype(np.float32),
        entropies=entropies,
        settings=SETTINGS,
        limits=clip_range_of(SETTINGS),
    )
    gap = t["logprobs"] - t["old"]
    assert metrics["mismatch/logp_abs_mean"] == pytest.approx(np.abs(gap).mean(), rel=1e-5)
    assert metrics["mismatch/logp_abs_max"] == pytest.approx(np.abs(gap).max(), rel=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx((np.exp(gap) - 1 - gap).mean(), rel=1e-4)
    assert metrics["train/entropy"] == pytest.approx(0.5)
    _, gradient = reference(t, token_count=200)
    assert metrics["train/clip_frac"] == pytest.approx((gradient == 0).mean())


def test_of_stored_answers_nobody_knows_how_far_trainer_and_sampler_are_apart():
    t, settings = tokens(), Loss(surrogate="sft")
    metrics = loss_metrics(
        loss_tokens({**t, "old": np.zeros(200)}),
        logprobs=t["logprobs"].astype(np.float32),
        entropies=np.full(200, 0.5, np.float32),
        settings=settings,
        limits=clip_range_of(settings),
    )
    assert metrics["train/entropy"] == pytest.approx(0.5)
    assert not [name for name in metrics if name.startswith("mismatch/")]


def test_of_sequences_the_share_that_is_clipped_is_that_of_their_ratios():
    """Four rows, the second of which is trained on again by a second update."""
    t, settings = tokens(), Loss(ratio="sequence", clip_low=0.02, clip_high=0.02)
    rows = np.repeat([0, 1, 2, 3], 40)
    where = np.concatenate([np.arange(160), np.arange(40, 80)])
    loss = replace(loss_tokens(t).where(where), rows=rows[where])
    loss.advantages[:] = np.repeat([1.0, -1.0, 1.0, -1.0, -1.0], 40)
    log_ratios = np.float32([0.1, -0.1, 0.01, 0.1, 0.01])
    logprobs = loss.sampler_logprobs + np.repeat(log_ratios, 40) + np.float32([0.3, -0.3] * 100)
    metrics = loss_metrics(
        loss,
        logprobs=logprobs,
        entropies=np.zeros(200, np.float32),
        settings=settings,
        limits=clip_range_of(settings),
    )
    ratios = np.exp(log_ratios.astype(np.float64))
    assert metrics["train/clip_frac"] == pytest.approx(2 / 5)
    assert metrics["train/ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)
    assert metrics["train/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)


@pytest.mark.parametrize("surrogate", ["dppo_tv", "dppo_kl"])
@pytest.mark.parametrize("old", ["sampler", "recomputed"])
def test_of_dppo_the_share_that_is_clipped_is_that_without_a_gradient(surrogate, old):
    t, settings = tokens(), Loss(surrogate=surrogate, old=old, clip_low=0.05, clip_high=0.08)
    loss = loss_tokens(t)
    logprobs = torch.tensor(t["logprobs"], requires_grad=True)
    before = torch.tensor(t["old"]) + 0.3 * (old == "recomputed")
    inputs = LossInputs(
        logprobs=logprobs,
        sampler_logprobs=torch.from_numpy(loss.sampler_logprobs),
        advantages=torch.from_numpy(loss.advantages),
        weights=torch.from_numpy(loss.weights),
        rows=torch.zeros(200, dtype=torch.long),
        row_count=1,
        old_logprobs=before,
    )
    policy_loss(inputs, settings, clip_range_of(settings), divisor=200).backward()
    metrics = loss_metrics(
        loss,
        logprobs=t["logprobs"],
        entropies=np.zeros(200, np.float32),
        settings=settings,
        limits=clip_range_of(settings),
        old_logprobs=before.numpy(),
    )
    assert metrics["train/clip_frac"] == (logprobs.grad == 0).double().mean()
    assert 0 < metrics["train/clip_frac"] < 0.5


def test_no_tokens_have_no_metrics():
    nothing = {name: part[:0] for name, part in tokens().items()}
    empty = np.zeros(0, np.float32)
    assert not loss_metrics(
        loss_tokens(nothing),
        logprobs=empty,
        entropies=empty,
        settings=SETTINGS,
        limits=clip_range_of(SETTINGS),
    )
