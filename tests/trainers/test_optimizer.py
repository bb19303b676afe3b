"""AdamW with a rising rate and clipped gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from astraflow.config.recipe import Optimizer
from astraflow.trainers.optimizer import AdamW


def reference(weights, gradients, settings, rates):
    """Return the weights after AdamW steps, f64, from the paper."""
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    low, high = settings.betas
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = np.linalg.norm(gradient)
        clipped = gradient * min(1.0, settings.max_grad_norm / norm)
        first = low * first + (1 - low) * clipped
        second = high * second + (1 - high) * clipped**2
        mean, spread = first / (1 - low**step), np.sqrt(second / (1 - high**step))
        decayed = weights * (1 - rate * settings.weight_decay)
        weights = decayed - rate * mean / (spread + settings.eps)
    return weights


def test_steps_are_those_of_the_paper():
    settings = Optimizer(
        learning_rate=1e-2, warm_up_steps=3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-6
    )
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(4, 3)), rng.normal(size=(6, 4, 3))
    parameter = nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = AdamW([parameter], settings)
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        assert optimizer.step(step) == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
        assert parameter.grad is None
    rates = [1e-2 * min(1, step / 3) for step in range(1, 7)]
    wanted = reference(start, gradients, settings, rates)
    np.testing.assert_allclose(parameter.detach().numpy(), wanted, atol=1e-6)


def test_rate_rises_then_stays():
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], Optimizer(learning_rate=1.0, warm_up_steps=4))
    assert [optimizer.rate(step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_rate_is_full_at_once_without_a_rise():
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], Optimizer(learning_rate=0.5))
    assert optimizer.rate(1) == 0.5


def test_rate_falls_to_a_tenth_between_two_steps():
    settings = Optimizer(learning_rate=1.0, warm_up_steps=2, decay=(4, 6))
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], settings)
    rates = [round(optimizer.rate(step), 6) for step in range(1, 9)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1, 0.1]


def test_a_decay_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match="decay needs two steps"):
        Optimizer(warm_up_steps=5, decay=(4, 9))
