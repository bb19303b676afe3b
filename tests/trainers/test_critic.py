"""The critic of PPO: what it learns, what it gives the policy, and how it is resumed."""

import numpy as np
import pytest
import torch

from astraflow.config.recipe import CriticConfig as CriticSettings
from astraflow.config.recipe import Kl, Loss, Optimizer, TrainerConfig
from astraflow.trainers.causal_model import load_causal_model
from astraflow.trainers.critic import CriticLearner, valued
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.rows import TrainRows

SETTINGS = CriticSettings(optimizer=Optimizer(learning_rate=3e-3))


@pytest.fixture
def rows(make_rows, to_part):
    """Rows whose reward is known from their first token."""
    batch = make_rows(24)
    for row in batch:
        row["reward"] = float(row["tokens"][0] % 2)
    return TrainRows.from_parts([to_part(batch)])


@pytest.fixture
def make_critic(make_model):
    return lambda: CriticLearner(valued(make_model().module), SETTINGS, max_tokens=64)


def test_a_new_critic_knows_nothing(make_critic, rows):
    values, advantages, _ = make_critic().estimate(rows)
    assert not values.any()
    assert advantages == pytest.approx(rows.rewards[rows.loss.rows])


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_values_that_are_off_by_a_constant_explain_all_the_variance(make_critic, rows, offset):
    critic = make_critic()
    _, _, returns = critic.estimate(rows)
    for share in (0.0, 0.5, 1.0):
        values = (share * returns + offset).astype(np.float32)
        with critic.stepping(rows, values, returns, 1) as metrics:
            pass
        wanted = 1 - (1 - share) ** 2
        assert metrics["critic/explained_variance"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
def test_it_learns_what_states_are_worth(make_critic, rows):
    critic = make_critic()
    for step in range(1, 41):
        values, _, returns = critic.estimate(rows)
        with critic.stepping(rows, values, returns, step) as metrics:
            pass
    assert metrics["critic/explained_variance"] > 0.8
    values, advantages, _ = critic.estimate(rows)
    assert np.abs(advantages).mean() < 0.2


def test_a_value_moves_no_further_than_its_clip(make_critic, rows):
    """Beyond the clip nothing is gained, so the gradient there is 0."""
    critic = make_critic()
    old = np.full(len(rows.loss), -10.0, np.float32)
    with critic.stepping(rows, old, np.ones(len(rows.loss)), 1) as metrics:
        pass
    assert metrics["critic/grad_norm"] == 0
    assert metrics["critic/loss"] == pytest.approx((1 - -9.5) ** 2 / 2)


def test_the_policy_learns_from_its_advantages_and_both_resume(
    make_model, model_dir, rows, tmp_path
):
    def trained(steps, state=None):
        model = valued(load_causal_model(model_dir, device="cpu").module)
        critic = CriticLearner(model, SETTINGS, max_tokens=64)
        settings = TrainerConfig(critic=SETTINGS, optimizer=Optimizer(learning_rate=1e-3))
        learner = PolicyLearner(make_model(), settings, critic=critic)
        if state is not None:
            folder, weights = state
            learner._model.module.load_state_dict(weights)
            learner.resume(folder)
        found = [dict(learner.step(rows, divisor=len(rows.loss))) for _ in range(steps)]
        return learner, found

    learner, first = trained(2)
    assert first[0]["train/grad_norm"] > 0
    assert first[1]["critic/loss"] < first[0]["critic/loss"]
    path = tmp_path / "optimizer.pt"
    torch.save(learner.state(), path)
    weights = {name: part.clone() for name, part in learner._model.module.state_dict().items()}
    going_on = [dict(learner.step(rows, divisor=len(rows.loss))) for _ in range(2)]
    _, resumed = trained(2, (tmp_path, weights))
    assert resumed == going_on


def test_a_kl_term_in_the_reward_is_refused_beside_a_critic():
    with pytest.raises(ValueError, match="does not see a KL term"):
        TrainerConfig(critic=SETTINGS, loss=Loss(kl=Kl(coefficient=0.1, where="reward")))
