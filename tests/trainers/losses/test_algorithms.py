"""Every algorithm of docs/losses.md against its formula, value and gradient."""

import numpy as np
import pytest
import torch

from astraflow.config.recipe import Correction, Kl, Loss
from astraflow.trainers.losses import LossInputs, clip_range_of, divisor_of, policy_loss, prepared
from astraflow.trainers.rows import LossTokens
from tests.trainers.losses.reference import batch_loss

DISTILLED = Kl(coefficient=1.0, estimator="k1", where="token")
ALGORITHMS = {
    "GRPO": Loss(mean="rows", clip_high=0.2),
    "DAPO": Loss(),
    "Dr. GRPO": Loss(mean="constant", row_tokens=40),
    "dual clip": Loss(dual_clip=3.0),
    "GSPO": Loss(ratio="sequence", mean="rows", clip_low=0.05, clip_high=0.05),
    "CISPO": Loss(surrogate="cispo", clip_low=1.0, clip_high=0.5),
    "SAPO": Loss(surrogate="sapo"),
    "DPPO by variation": Loss(surrogate="dppo_tv", clip_low=0.05, clip_high=0.03),
    "DPPO by KL": Loss(surrogate="dppo_kl", clip_low=0.01, clip_high=0.005),
    "DPPO of sequences": Loss(surrogate="dppo_tv", ratio="sequence", clip_low=0.05, clip_high=0.03),
    "REINFORCE": Loss(surrogate="reinforce"),
    "M2PO": Loss(m2_threshold=0.04),
    "decoupled PPO": Loss(old="recomputed", correction=Correction(high=1e6)),
    "truncated": Loss(old="recomputed", correction=Correction(high=1.2)),
    "masked": Loss(old="recomputed", correction=Correction(style="mask", low=0.7, high=1.4)),
    "truncated sequences": Loss(old="recomputed", correction=Correction(level="sequence")),
    "masked sequences": Loss(
        old="recomputed", correction=Correction(style="mask", level="geometric", low=0.9, high=1.1)
    ),
    "k2 in the loss": Loss(kl=Kl(coefficient=0.1, estimator="k2")),
    "k3 in the loss": Loss(kl=Kl(coefficient=0.1)),
    "k1 in the reward": Loss(kl=Kl(coefficient=0.1, estimator="k1", where="reward")),
    "k2 in the reward": Loss(kl=Kl(coefficient=0.1, estimator="k2", where="reward")),
    "k3 in the reward": Loss(kl=Kl(coefficient=0.1, where="reward")),
    "fine-tuning": Loss(surrogate="sft"),
    "fine-tuning by rows": Loss(surrogate="sft", mean="rows"),
    "distillation": Loss(advantage_scale=0, kl=DISTILLED),
    "distillation beside rewards": Loss(surrogate="reinforce", advantage_scale=0.5, kl=DISTILLED),
}


def some_rows(seed=0, count=12):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(rng.integers(1, 12))
        old = -rng.random(length) * 3
        rows.append(
            {
                "logprobs": old + rng.normal(size=length) * 0.3,
                "sampler_logprobs": old,
                "reference": old + rng.normal(size=length) * 0.3,
                "advantages": np.full(length, rng.normal()),
                "weights": rng.random(length) + 0.5,
            }
        )
    return rows


def joined(rows, name):
    return np.concatenate([row[name] for row in rows])


def loss_tokens(rows):
    count = len(joined(rows, "logprobs"))
    return LossTokens(
        positions=np.arange(count),
        rows=np.repeat(np.arange(len(rows)), [len(row["logprobs"]) for row in rows]),
        sampler_logprobs=joined(rows, "sampler_logprobs"),
        advantages=joined(rows, "advantages"),
        weights=joined(rows, "weights"),
        temperatures=np.ones(count),
    )


def limits_of(rows, settings):
    gap = joined(rows, "logprobs") - joined(rows, "sampler_logprobs")
    return clip_range_of(settings, gap, joined(rows, "advantages"))


def measured(settings, rows, dtype, *, passes=1):
    """Return loss and gradient, the rows shared out over passes."""
    limits = limits_of(rows, settings)
    token_count = len(joined(rows, "logprobs"))
    divisor = divisor_of(settings, row_count=len(rows), token_count=token_count)
    loss, gradients = 0.0, []
    for some in np.array_split(np.arange(len(rows)), passes):
        chosen = [rows[index] for index in some]
        reference = joined(chosen, "reference")
        tokens = prepared(loss_tokens(chosen), settings, reference_logprobs=reference)
        logprobs = torch.tensor(joined(chosen, "logprobs"), dtype=dtype, requires_grad=True)
        inputs = LossInputs(
            logprobs=logprobs,
            sampler_logprobs=torch.tensor(tokens.sampler_logprobs, dtype=dtype),
            advantages=torch.tensor(tokens.advantages, dtype=dtype),
            weights=torch.tensor(tokens.weights, dtype=dtype),
            rows=torch.tensor(tokens.rows),
            row_count=len(chosen),
            reference_logprobs=torch.tensor(reference, dtype=dtype),
        )
        share = policy_loss(inputs, settings, limits, divisor=divisor)
        share.backward()
        loss += share.item()
        gradients.append(logprobs.grad)
    return loss, torch.cat(gradients)


def wanted(settings, rows):
    limits = limits_of(rows, settings)
    scalars = [
        {name: [*torch.tensor(values, dtype=torch.float64)] for name, values in row.items()}
        for row in rows
    ]
    return batch_loss(settings, scalars, low=limits.low, high=limits.high)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_and_gradient_are_those_of_the_formula(name, dtype, tolerance):
    settings, rows = ALGORITHMS[name], some_rows()
    loss, gradient = measured(settings, rows, dtype)
    right_loss, right_gradient = wanted(settings, rows)
    assert loss == pytest.approx(right_loss, rel=tolerance)
    scale = float(right_gradient.abs().max())
    torch.testing.assert_close(
        gradient.double(), right_gradient.double(), rtol=tolerance, atol=tolerance * scale
    )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_passes_change_nothing(name):
    settings, rows = ALGORITHMS[name], some_rows(seed=1)
    loss, gradient = measured(settings, rows, torch.float64)
    shares, parts = measured(settings, rows, torch.float64, passes=5)
    assert shares == pytest.approx(loss, rel=1e-9)
    torch.testing.assert_close(parts, gradient, rtol=1e-9, atol=1e-15)


def test_distillation_follows_the_divergence_from_the_teacher_on_average():
    """Over all tokens that can be drawn, the gradient is that of KL(policy, teacher), f64."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=chance, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    teacher = torch.randn(7, generator=chance, dtype=torch.float64).log_softmax(0)
    settings = Loss(advantage_scale=0, kl=DISTILLED)
    drawn = logprobs.detach()
    tokens = LossTokens(
        positions=np.arange(7),
        rows=np.arange(7),
        sampler_logprobs=drawn.numpy(),
        advantages=np.full(7, 3.0),
        weights=drawn.exp().numpy(),
        temperatures=np.ones(7),
    )
    tokens = prepared(tokens, settings, reference_logprobs=teacher.numpy())
    inputs = LossInputs(
        logprobs=logprobs,
        sampler_logprobs=drawn,
        advantages=torch.from_numpy(tokens.advantages),
        weights=drawn.exp(),
        rows=torch.arange(7),
        row_count=7,
        reference_logprobs=teacher,
    )
    loss = policy_loss(inputs, settings, clip_range_of(settings), divisor=1)
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (right,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)


def test_kl_is_taken_off_before_advantages_are_whitened():
    """REINFORCE++ (arXiv 2501.03262, equations 4 and 5): A = r - beta sum KL, then normalised."""
    rows, kl = some_rows(), Kl(coefficient=0.3, estimator="k1", where="reward")
    reference = joined(rows, "reference")
    earned = []
    for row in rows:
        spent = row["sampler_logprobs"] - row["reference"]
        earned += [row["advantages"][t] - 0.3 * spent[t:].sum() for t in range(len(spent))]
    found = prepared(loss_tokens(rows), Loss(whiten=True, kl=kl), reference_logprobs=reference)
    right = (earned - np.mean(earned)) / np.std(earned)
    np.testing.assert_allclose(found.advantages, right, rtol=1e-5)


def test_a_kl_term_without_its_reference_is_refused():
    some = torch.zeros(2)
    inputs = LossInputs(
        **dict.fromkeys(("logprobs", "sampler_logprobs", "advantages", "weights"), some),
        rows=torch.arange(2),
        row_count=2,
    )
    in_the_loss = Loss(kl=Kl(coefficient=0.1))
    in_the_reward = Loss(kl=Kl(coefficient=0.1, where="reward"))
    with pytest.raises(ValueError, match="needs the log-probabilities of its reference"):
        policy_loss(inputs, in_the_loss, clip_range_of(in_the_loss), divisor=1)
    with pytest.raises(ValueError, match="needs the log-probabilities of its reference"):
        prepared(loss_tokens(some_rows()), in_the_reward)


@pytest.mark.parametrize(
    "keys",
    [
        {"surrogate": "sft", "whiten": True},
        {"surrogate": "sft", "kl": DISTILLED},
        {"kl": {"coefficient": 1.0, "where": "token"}},
    ],
)
def test_what_means_nothing_is_refused(keys):
    with pytest.raises(ValueError, match=r"sft knows no|needs estimator k1"):
        Loss.model_validate(keys)
