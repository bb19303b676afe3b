"""Updates by minibatches against the loss functions of verl and AReaL themselves.

`ASTRAFLOW_VERL_PYTHON` names an interpreter that has verl 0.9, `ASTRAFLOW_AREAL_PYTHON` one that
has AReaL 1.0. docs/losses-elsewhere.md says what they do otherwise.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.config.recipe import Correction, Kl, Loss, Optimizer, TrainerConfig
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.passes import minibatches_of
from astraflow.trainers.rows import TrainRows
from tests.trainers.conftest import UNCLIPPED, make_row, seen_gradients, to_part

COUNT, RATE, EPS = 4, 5e-3, 0.1
CLOSE = 1e-6
# Gradients below 1 and smooth steps, so that single precision says enough; and the same weights, a
# little larger, as the reference: no token is so much likelier that verl cuts k3 off.
MODEL, REFERENCE = {"initializer_range": 0.1}, {"initializer_range": 0.11}

# A clip that does not bind, where verl has no way to leave it out.
NO_DUAL = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e6}
NEAR = {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1e6}
CISPO = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.5}
BY_ROWS = {"mode": "seq-mean-token-mean"}
PPO = {"loss": "vanilla", "actor": NO_DUAL}
VERL = {
    "PPO": (Loss(), PPO | {"is_sampler_old": True}),
    "dual clip": (
        Loss(dual_clip=1.5),
        PPO | {"actor": NO_DUAL | {"clip_ratio_c": 1.5}, "is_sampler_old": True},
    ),
    "GRPO": (Loss(mean="rows"), PPO | BY_ROWS | {"is_sampler_old": True}),
    "Dr. GRPO": (
        Loss(mean="constant", row_tokens=40),
        PPO
        | {
            "mode": "seq-mean-token-sum-norm",
            "batch": {"loss_scale_factor": 40},
            "is_sampler_old": True,
        },
    ),
    "GSPO": (
        Loss(ratio="sequence", mean="rows", clip_low=0.05, clip_high=0.1),
        BY_ROWS
        | {
            "loss": "gspo",
            "actor": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1},
            "is_sampler_old": True,
        },
    ),
    "SAPO": (
        Loss(surrogate="sapo", mean="rows"),
        BY_ROWS | {"loss": "sapo", "is_sampler_old": True},
    ),
    "CISPO": (
        Loss(surrogate="cispo", clip_low=0.9, clip_high=0.5),
        {"loss": "cispo", "actor": CISPO, "is_sampler_old": True},
    ),
    "old recomputed": (
        Loss(old="recomputed", clip_low=0.02, clip_high=0.03),
        PPO | {"actor": NEAR},
    ),
    "truncated": (
        Loss(old="recomputed", correction=Correction(high=1.2)),
        PPO | {"correction": {"rollout_is": "token", "rollout_is_threshold": 1.2}},
    ),
    "truncated sequences": (
        Loss(old="recomputed", correction=Correction(level="sequence", high=1.5)),
        PPO | {"correction": {"rollout_is": "sequence", "rollout_is_threshold": 1.5}},
    ),
    "IcePop": (
        Loss(old="recomputed", correction=Correction(style="mask", low=0.7, high=1.4)),
        PPO | {"correction": {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"}},
    ),
    "k2 in the loss": (
        Loss(kl=Kl(coefficient=0.1, estimator="k2")),
        PPO | {"kl": {"coefficient": 0.1, "type": "k2"}, "is_sampler_old": True},
    ),
    "k3 in the loss": (
        Loss(kl=Kl(coefficient=0.1), mean="rows"),
        PPO | BY_ROWS | {"kl": {"coefficient": 0.1, "type": "low_var_kl"}, "is_sampler_old": True},
    ),
}
# The same gradients of another cost: what has no gradient there is a factor of log p.
BY_GRADIENT = {
    "DPPO by variation": (
        Loss(surrogate="dppo_tv", clip_low=0.05, clip_high=0.03),
        {
            "loss": "dppo_tv",
            "actor": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.03, "clip_ratio_c": 1e6},
            "is_sampler_old": True,
        },
    ),
    "DPPO by KL": (
        Loss(surrogate="dppo_kl", clip_low=0.01, clip_high=0.005),
        {
            "loss": "dppo_kl",
            "actor": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.005, "clip_ratio_c": 1e6},
            "is_sampler_old": True,
        },
    ),
}

CLIPPED = {"eps_clip": 0.2, "eps_clip_higher": 0.28}
AREAL = {
    "PPO": (Loss(), {"loss": "ppo", "options": CLIPPED, "is_sampler_old": True}),
    "dual clip": (
        Loss(dual_clip=1.5),
        {"loss": "ppo", "options": CLIPPED | {"c_clip": 1.5}, "is_sampler_old": True},
    ),
    "GSPO": (
        Loss(ratio="sequence", clip_low=0.05, clip_high=0.1),
        {
            "loss": "ppo",
            "options": {
                "eps_clip": 0.05,
                "eps_clip_higher": 0.1,
                "importance_sampling_level": "sequence",
            },
            "is_sampler_old": True,
        },
    ),
    "SAPO": (
        Loss(surrogate="sapo"),
        {"loss": "sapo", "options": {"tau_pos": 1.0, "tau_neg": 1.05}},
    ),
    "old recomputed": (
        Loss(old="recomputed", clip_low=0.02, clip_high=0.03),
        {"loss": "ppo", "options": {"eps_clip": 0.02, "eps_clip_higher": 0.03}},
    ),
    "decoupled": (
        Loss(old="recomputed", correction=Correction(style="mask", high=1.4)),
        {"loss": "ppo", "options": CLIPPED, "rejection": {"upper": 1.4}},
    ),
    "masked on both sides": (
        Loss(old="recomputed", correction=Correction(style="mask", low=0.7, high=1.4)),
        {"loss": "ppo", "options": CLIPPED, "rejection": {"lower": 0.7, "upper": 1.4}},
    ),
    "truncated": (
        Loss(old="recomputed", correction=Correction(high=1.2)),
        {"loss": "ppo", "options": CLIPPED, "rejection": {"action": "clamp", "upper": 1.2}},
    ),
    "masked sequences": (
        Loss(
            old="recomputed",
            correction=Correction(style="mask", level="geometric", low=0.8, high=1.1),
        ),
        {
            "loss": "ppo",
            "options": CLIPPED,
            "rejection": {"level": "sequence", "lower": 0.8, "upper": 1.1},
        },
    ),
    "truncated sequences": (
        Loss(old="recomputed", correction=Correction(level="geometric", high=1.1)),
        {
            "loss": "ppo",
            "options": CLIPPED,
            "rejection": {"level": "sequence", "action": "clamp", "upper": 1.1},
        },
    ),
}
CASES = {"verl": VERL | BY_GRADIENT, "areal": AREAL}


def near_rows(make_model):
    """16 rows of four prompts, sampled from a policy that is not far away."""
    rng, batch = np.random.default_rng(3), []
    for _ in range(4):
        prompt = rng.integers(3, 14, 4)
        for _ in range(4):
            row = make_row(rng, length=int(rng.integers(7, 14)), advantage=float(rng.normal()))
            row["tokens"][:4] = prompt
            batch.append(row)
    rows = TrainRows.from_parts([to_part(batch)])
    near = likelihoods(make_model(**MODEL), rows)
    rows.loss.sampler_logprobs[:] = near + rng.normal(size=len(near)).astype(np.float32) * 0.5
    return rows


def likelihoods(model, rows):
    everything = np.ones(rows.row_count, np.bool_)
    return PolicyLearner(model, TrainerConfig()).likelihoods(rows, everything).logprobs


def write_inputs(folder, cases, make_model):
    """Write what `published.py` trains by."""
    rows = near_rows(make_model)
    make_model(**MODEL).module.save_pretrained(folder / "model")
    np.savez(
        folder / "rows.npz",
        tokens=rows.tokens,
        offsets=rows.offsets,
        positions=rows.loss.positions,
        rows=rows.loss.rows,
        sampler=rows.loss.sampler_logprobs,
        advantages=rows.loss.advantages,
        reference=likelihoods(make_model(**REFERENCE), rows),
        parts=np.array(list(minibatches_of(rows, count=COUNT, epochs=1))),
    )
    told = {name: {**case, "optimizer": [RATE, EPS]} for name, (_, case) in cases.items()}
    (folder / "cases.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def published(make_model, tmp_path_factory):
    """Returns a folder of what a framework makes of all of its cases."""
    made = {}

    def trained(framework):
        variable = f"ASTRAFLOW_{framework.upper()}_PYTHON"
        python = os.environ.get(variable)
        if not python:
            pytest.skip(f"{variable} names no interpreter that has {framework}")
        if framework not in made:
            made[framework] = folder = tmp_path_factory.mktemp(framework)
            write_inputs(folder, CASES[framework], make_model)
            script = Path(__file__).with_name("published.py")
            subprocess.run([python, script, framework, folder], check=True)
        return made[framework]

    return trained


def learned(make_model, loss):
    """Return the mean loss, the gradient of each update and the weights after the last."""
    model = make_model(**MODEL)
    settings = TrainerConfig(
        loss=loss,
        minibatches=COUNT,
        # A large eps: an update is a smooth function of the gradient.
        optimizer=Optimizer(learning_rate=RATE, eps=EPS, max_grad_norm=UNCLIPPED),
        max_tokens_per_pass=64,
    )
    reference = make_model(**REFERENCE) if loss.kl else None
    learner, rows = PolicyLearner(model, settings, reference=reference), near_rows(make_model)
    with seen_gradients(model.module) as seen:
        metrics = learner.step(rows, divisor=len(rows.loss))
    assert metrics["train/updates"] == COUNT
    return (
        metrics["train/loss"],
        np.stack([flat(each.values()) for each in seen]),
        flat(each.detach() for each in model.module.parameters()),
    )


def flat(tensors):
    return torch.cat([each.reshape(-1) for each in tensors]).numpy()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("framework", "name"),
    [(framework, name) for framework, cases in CASES.items() for name in cases],
)
def test_updates_are_those_of_the_framework(framework, name, published, make_model):
    found = np.load(published(framework) / f"{name}.npz")
    loss, gradients, weights = learned(make_model, CASES[framework][name][0])
    apart = {
        "loss": abs(loss - found["losses"].mean()),
        "gradients": np.abs(gradients - found["gradients"]).max(),
        "weights": np.abs(weights - found["weights"]).max(),
    }
    # With `pytest -s`: the figures.
    figures = ", ".join(f"{what} {by:.1e}" for what, by in apart.items())
    sys.stdout.write(f"{framework}, {name}: apart by {figures}\n")
    if name in BY_GRADIENT:
        del apart["loss"]
    assert max(apart.values()) <= CLOSE
    assert np.abs(gradients).max() > 100 * CLOSE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", CASES)
def test_every_case_says_something_of_its_own(framework, published):
    folder = published(framework)
    gradients = [np.load(folder / f"{name}.npz")["gradients"] for name in CASES[framework]]
    for index, one in enumerate(gradients):
        for other in gradients[:index]:
            assert np.abs(one - other).max() > 100 * CLOSE
