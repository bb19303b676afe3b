"""The trainer takes the experts that the sampler took."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.config.recipe import EngineSettings, Kl, Loss, Optimizer, TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import ROUTED_EXPERTS, UNROUTED, Column, ColumnAxis
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.model_files import save_model
from astraflow.trainers.peers import ALONE
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.torch_engine import replay_metrics, replayed

SETTINGS = TrainerConfig(optimizer=Optimizer(learning_rate=1e-2))


@pytest.fixture
def experts(make_mixture):
    return CausalModel(make_mixture(num_experts=16), never_sampled=(0,))


def with_routes(part, routes):
    column = Column(axis=ColumnAxis.TOKEN, values=routes)
    return replace(part, columns={**part.columns, ROUTED_EXPERTS: column})


async def sampled(directory, count):
    """What the engine samples in bf16: (prompt, generation)."""
    settings = EngineSettings(device="cpu", dtype="bf16")
    engine = EmbeddedEngine.from_directory(directory, settings, "solver")
    prompts = [[3 + seed % 9, 4 + seed % 7, 5] for seed in range(count)]
    try:
        await engine.load_directory(version=0)
        asked = (
            engine.generate(prompt, SamplingParams(max_new_tokens=16, seed=seed, ignore_eos=True))
            for seed, prompt in enumerate(prompts)
        )
        return list(zip(prompts, await asyncio.gather(*asked), strict=True))
    finally:
        await engine.close()


def mismatch(model, rows):
    seen = PolicyLearner(model, SETTINGS).likelihoods(rows, np.ones(rows.row_count, np.bool_))
    return np.abs(seen.logprobs - rows.loss.sampler_logprobs)


def test_replay_takes_the_jumps_out_of_the_mismatch(tmp_path, experts, make_row, to_part):
    save_model(experts.module, tmp_path / "model")
    made, rng = asyncio.run(sampled(tmp_path / "model", 64)), np.random.default_rng(0)
    batch = []
    for prompt, one in made:
        row = make_row(rng, prompt=len(prompt), length=len(prompt) + len(one.tokens))
        logprobs = np.concatenate([np.zeros(len(prompt)), one.logprobs]).astype(np.float32)
        tokens = np.array([*prompt, *one.tokens], np.int32)
        batch.append({**row, "tokens": tokens, "logprobs": logprobs})
    part = to_part(batch)
    routes = np.concatenate([one.routed_experts for _, one in made])
    without = mismatch(experts, TrainRows.from_parts([part]))
    replayed = mismatch(experts, TrainRows.from_parts([with_routes(part, routes)]))
    assert without.max() > 4 * replayed.max()
    assert without.mean() > replayed.mean()


def test_a_step_learns_through_replayed_experts(experts, make_rows, to_part):
    part = to_part(make_rows(6))
    count = int(part.row_offsets[-1])
    routes = np.tile(np.array([2, 1], np.uint16), (count, 2, 1))
    rows = TrainRows.from_parts([with_routes(part, routes)])
    stacks = {n: p for n, p in experts.module.named_parameters() if n.endswith("gate_up_proj")}
    before = {name: each.detach().clone() for name, each in stacks.items()}
    PolicyLearner(experts, SETTINGS).step(rows, divisor=len(rows.loss))
    for name, old in before.items():
        moved = (stacks[name] != old).flatten(1).any(1)
        assert torch.equal(moved.nonzero().flatten(), torch.tensor([1, 2]))


def test_parts_without_routes_take_their_own(make_rows, to_part):
    first, second = to_part(make_rows(2)), to_part(make_rows(3, seed=1), index=1)
    routes = np.zeros((int(first.row_offsets[-1]), 2, 2), np.uint16)
    rows = TrainRows.from_parts([with_routes(first, routes), second])
    assert len(rows.routed_experts) == len(rows.tokens)
    assert (rows.routed_experts[len(routes) :] == UNROUTED).all()
    assert TrainRows.from_parts([second]).routed_experts is None


def test_a_dense_model_cannot_replay(make_model, make_rows, to_part):
    part = to_part(make_rows(2))
    routes = np.zeros((int(part.row_offsets[-1]), 2, 2), np.uint16)
    rows = TrainRows.from_parts([with_routes(part, routes)])
    with pytest.raises(AstraflowError, match="no routers") as caught:
        PolicyLearner(make_model(), SETTINGS).step(rows, divisor=1)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_a_dense_reference_compares_with_a_mixture(experts, make_model, make_rows, to_part):
    part = to_part(make_rows(3))
    routes = np.zeros((int(part.row_offsets[-1]), 2, 2), np.uint16)
    rows = TrainRows.from_parts([with_routes(part, routes)])
    settings = SETTINGS.model_copy(update={"loss": Loss(kl=Kl(coefficient=0.1))})
    learner = PolicyLearner(experts, settings, reference=make_model())
    assert np.isfinite(learner.step(rows, divisor=len(rows.loss))["train/loss"])


def test_the_recipe_says_whether_routes_are_followed(experts, make_rows, to_part):
    first, second = to_part(make_rows(2)), to_part(make_rows(3, seed=1), index=1)
    routes = np.zeros((int(first.row_offsets[-1]), 2, 2), np.uint16)
    rows = TrainRows.from_parts([with_routes(first, routes), second])
    told = replayed(rows, experts, "told")
    share = replay_metrics(told, experts, ALONE)["mismatch/replayed_frac"]
    assert share == pytest.approx((rows.loss.rows < 2).mean())
    assert replayed(rows, experts, "never").routed_experts is None
    with pytest.raises(AstraflowError, match="do not say which experts") as caught:
        replayed(rows, experts, "required")
    assert caught.value.reason is Reason.INVALID_FIELD
    whole = TrainRows.from_parts([with_routes(first, routes)])
    assert replayed(whole, experts, "required") is whole


def test_a_dense_model_says_nothing_of_replay(make_model, make_rows, to_part):
    rows = TrainRows.from_parts([to_part(make_rows(2))])
    assert replayed(rows, make_model(), "told") is rows
    assert replay_metrics(rows, make_model(), ALONE) == {}
