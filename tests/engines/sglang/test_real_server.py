"""What is asked of a real SGLang server beside the contract."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from astraflow.config.recipe import EngineSettings
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.engines.building import build_engine

POLICY = PolicyId("sort")

pytestmark = pytest.mark.sglang


@pytest.fixture
async def url(server_url: Callable[[str], str]) -> str:
    return await asyncio.to_thread(server_url, "sglang")


@asynccontextmanager
async def attached(model: Any, url: str, **settings: Any) -> AsyncIterator[Any]:
    told = EngineSettings(kind="sglang", url=url, **settings)
    engine: Any = build_engine(model.folder, told, POLICY)
    try:
        yield engine
    finally:
        await engine.close()


def knobs(length: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, seed=1, ignore_eos=True)


async def test_one_that_was_left_paused_in_an_update_goes_on(long_model: Any, url: str):
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
        await http.post("/pause_generation", json={"mode": "in_place"})
        await http.post("/begin_weight_update", json={})
    async with attached(long_model, url) as engine:
        for version in (0, 1):
            await engine.swap(long_model.update(version, seed=version))
        generation = await engine.generate([3, 4], knobs(12))
    expected = long_model.logprobs(1, [3, 4], generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)
    assert [span.version for span in generation.version_spans] == [1]


async def test_a_recomputed_cache_is_that_of_the_new_version(long_model: Any, url: str):
    prompts = [[3, 4, 5], [6] * 40, [3, 4, 5, 7]]
    begun = [asyncio.Event() for _ in prompts]
    async with attached(long_model, url, kv="recompute") as engine:
        for version in (0, 1):
            await engine.swap(long_model.update(version, seed=version))
        tasks = [
            asyncio.ensure_future(
                engine.generate(prompt, knobs(400), watch=lambda _, e=event: e.set())
            )
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        await engine.swap(long_model.update(2, seed=2))
        generations = await asyncio.gather(*tasks)
    for prompt, generation in zip(prompts, generations, strict=True):
        first, second = generation.version_spans
        assert (first.version, second.version, second.kv) == (1, 2, KvPolicy.RECOMPUTE)
        assert first.length + second.length == 400
        new = long_model.logprobs(2, prompt, generation.tokens)
        np.testing.assert_allclose(
            generation.logprobs[first.length :], new[first.length :], atol=1e-4
        )
