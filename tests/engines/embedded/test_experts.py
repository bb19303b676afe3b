"""Which experts tokens went through, as they were sampled."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from astraflow.config.recipe import EngineSettings
from astraflow.core.rollouts import ROUTED_EXPERTS, UNROUTED
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine, load_tokenizer
from astraflow.engines.routers import RouteTaps
from astraflow.wire.rollout import decode_trajectory, encode_trajectory
from astraflow.workflows.episode import Recorder
from astraflow.workflows.ports import PolicyPort


@pytest.fixture
async def engine(make_model, make_mixture):
    model = make_model(make_mixture().config, Qwen3MoeForCausalLM)
    engine = EmbeddedEngine.from_directory(model.folder, EngineSettings(device="cpu"), "sort")
    await engine.swap(model.update(0, seed=0))
    yield engine, model
    await engine.close()


def knobs(length=12):
    return SamplingParams(max_new_tokens=length, seed=1, ignore_eos=True)


def routes_of(model, tokens):
    module = model.reference(0)
    taps = RouteTaps(module)
    with torch.no_grad():
        module(input_ids=torch.tensor([tokens]))
    return taps.last(1, len(tokens))[0]


async def test_routes_are_those_of_the_model(engine):
    made, model = engine
    prompts = [[3, 9, 4, 13], [5, 6], [3, 9, 4, 13, 7, 8]]
    found = await asyncio.gather(*(made.generate(prompt, knobs()) for prompt in prompts))
    for prompt, one in zip(prompts, found, strict=True):
        tokens = [*prompt, *one.tokens.tolist()]
        assert one.routed_experts.shape == (len(tokens), 2, 2)
        np.testing.assert_array_equal(one.routed_experts[:-1], routes_of(model, tokens)[:-1])
        assert (one.routed_experts[-1] == UNROUTED).all()


async def test_a_checkpoint_with_each_expert_on_its_own_is_read(engine):
    made, model = engine
    before = await made.generate([3, 9], knobs())
    await made.load_directory(1, model.folder)
    after = await made.generate([3, 9], knobs())
    np.testing.assert_allclose(before.logprobs, after.logprobs, rtol=1e-5)
    assert made.tells_experts


async def test_a_trajectory_of_several_turns_has_one_column(engine):
    made, model = engine
    tokenizer = load_tokenizer(model.folder)
    port = PolicyPort(policy_id="sort", engine=made, tokenizer=tokenizer, sampling=knobs())
    recorder = Recorder(trajectory_id="t", port=port, agent="", seed=1)
    for observed in ([3, 9, 4], [13, 5]):
        recorder.observe(observed)
        await recorder.sample(max_new_tokens=4)
    trajectory = decode_trajectory(encode_trajectory(recorder.to_trajectory(segment_index=0)))
    routes = trajectory.columns[ROUTED_EXPERTS].values
    tokens = trajectory.tokens.tolist()
    assert routes.dtype == np.uint16
    np.testing.assert_array_equal(routes[:-1], routes_of(model, tokens)[:-1])
    assert (routes[-1] == UNROUTED).all()
