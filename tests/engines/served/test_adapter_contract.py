"""What servers must do for several policies that adapt one model; the servers are real."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.engines.building import build_adapter_engines
from astraflow.engines.served.dialect import AdapterLimits
from tests.engines.adapter_updates import POLICIES, PROMPT, adapters, expected, knobs, update
from tests.engines.processes import processes_below, what_computes

LENGTH = 1500
LAYERS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
ROOM = AdapterLimits(count=8, rank=8, targets=LAYERS)


@pytest.fixture(params=[pytest.param("vllm", marks=pytest.mark.vllm)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(long_model: Any) -> Any:
    return long_model


@pytest.fixture
async def engines(
    kind: str, model: Any, server_url: Callable[..., str]
) -> AsyncIterator[dict[str, Any]]:
    """Both attached to one server, without a version."""
    url = await asyncio.to_thread(server_url, kind, ROOM)
    made = build_adapter_engines(model.folder, EngineSettings(kind=kind, url=url), POLICIES)
    yield dict(made)
    for engine in made.values():
        await engine.close()


def some(engines: dict[str, Any], policy: str, seed: int) -> dict[str, np.ndarray]:
    return adapters(engines[policy]._model.shapes, seed)


async def live(engines: dict[str, Any], version: int = 0, seed: int = 0) -> dict[str, Any]:
    """Give both policies adapters; return them."""
    given: dict[str, Any] = {}
    for index, (policy, engine) in enumerate(engines.items()):
        given[policy] = some(engines, policy, seed + index)
        await engine.swap(update(policy, version, given[policy]))
    return given


async def begun(engine: Any, length: int = LENGTH) -> "asyncio.Task[Any]":
    """Return a generation that has sampled a token."""
    first = asyncio.Event()
    task = asyncio.ensure_future(
        engine.generate(PROMPT, knobs(length), watch=lambda _: first.set())
    )
    await first.wait()
    return task


def versions(generation: Any) -> list[int]:
    return [span.version for span in generation.version_spans]


async def known_adapters(engine: Any) -> set[str]:
    """Return what the server has beside its model."""
    http = await engine._host.server.wait_up()
    answer = await http.get("/v1/models")
    return {each["id"] for each in answer.json()["data"] if each.get("parent")}


async def test_greedy_takes_what_the_merged_model_takes(engines: dict[str, Any], model: Any):
    given = await live(engines)
    found = await asyncio.gather(
        *(engine.generate(PROMPT, knobs(60, temperature=0.0)) for engine in engines.values())
    )
    for policy, generation in zip(engines, found, strict=True):
        reference = model.adapted(given[policy], scale=POLICIES[policy].scale)
        reference.generation_config.update(suppress_tokens=[0, 1], eos_token_id=None)
        ids = torch.tensor([PROMPT])
        wanted = reference.generate(ids, max_new_tokens=60, do_sample=False)[0, len(PROMPT) :]
        assert generation.tokens.tolist() == wanted.tolist()
    assert found[0].tokens.tolist() != found[1].tokens.tolist()


async def test_one_server_samples_with_the_adapters_of_each_policy(
    engines: dict[str, Any], model: Any
):
    given = await live(engines)
    asked = [(policy, seed) for seed in range(3) for policy in engines]
    found = await asyncio.gather(
        *(engines[policy].generate(PROMPT, knobs(seed=seed)) for policy, seed in asked)
    )
    for (policy, _), one in zip(asked, found, strict=True):
        wanted = expected(model, policy, given[policy], one.tokens)
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)


async def test_a_version_takes_over_with_new_requests_and_none_is_aborted(
    engines: dict[str, Any], model: Any
):
    given = await live(engines)
    tasks = {policy: await begun(engine) for policy, engine in engines.items()}
    changed = some(engines, "solver", 9)
    report = await engines["solver"].swap(update("solver", 1, changed, base=0))
    assert (report.version, report.inflight_count) == (1, 1)
    new = await engines["solver"].generate(PROMPT, knobs())
    assert not tasks["solver"].done()
    assert versions(new) == [1]
    wanted = expected(model, "solver", changed, new.tokens)
    np.testing.assert_allclose(new.logprobs, wanted, atol=1e-4)
    for policy, task in tasks.items():
        old = await task
        assert (old.finish_reason, len(old.tokens)) == (FinishReason.LENGTH, LENGTH)
        assert versions(old) == [0]
        wanted = expected(model, policy, given[policy], old.tokens)
        np.testing.assert_allclose(old.logprobs, wanted, atol=1e-3)


async def test_a_sparse_update_changes_the_named_elements(engines: dict[str, Any], model: Any):
    given = await live(engines)
    name = min(given["solver"])
    given["solver"][name].reshape(-1)[[1, 5]] = [2.5, -2.5]
    changed = {name: given["solver"][name]}
    await engines["solver"].swap(update("solver", 1, changed, base=0, indices=[1, 5]))
    for policy, engine in engines.items():
        one = await engine.generate(PROMPT, knobs())
        wanted = expected(model, policy, given[policy], one.tokens)
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)


async def test_no_prompt_is_read_from_the_cache_of_another_adapter(
    engines: dict[str, Any], model: Any
):
    """The server shares blocks of 128 tokens, so the prompt is longer."""
    prompt = [3 + n % 11 for n in range(300)]
    for version in (0, 1):
        await live(engines, version=version, seed=10 * version)
        found = [await engine.generate(prompt, knobs(4)) for engine in engines.values()]
    assert [versions(one) for one in found] == [[1], [1]]
    for index, (policy, one) in enumerate(zip(engines, found, strict=True)):
        module = model.adapted(some(engines, policy, 10 + index), scale=POLICIES[policy].scale)
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *one.tokens.tolist()]])).logits[0, 299:-1]
        logits[:, :2] = -torch.inf
        rows = torch.log_softmax(logits, -1)[torch.arange(4), torch.from_numpy(one.tokens).long()]
        np.testing.assert_allclose(one.logprobs, rows.numpy(), atol=1e-4)


async def test_a_pinned_version_samples_beside_newer_ones(engines: dict[str, Any], model: Any):
    given, solver = await live(engines), engines["solver"]
    await solver.pin(0)
    for version in (1, 2):
        await live(engines, version=version, seed=10 * version)
    assert solver.pinned_versions == {0}
    old, new = await asyncio.gather(
        solver.generate(PROMPT, knobs(), version=0), solver.generate(PROMPT, knobs())
    )
    assert [versions(old), versions(new)] == [[0], [2]]
    wanted = expected(model, "solver", given["solver"], old.tokens)
    np.testing.assert_allclose(old.logprobs, wanted, atol=1e-4)
    await solver.unpin(0)
    with pytest.raises(AstraflowError, match="version 0 is not served") as caught:
        await solver.generate(PROMPT, knobs(), version=0)
    assert caught.value.reason is Reason.VERSION_NOT_SERVED


async def test_versions_that_nobody_needs_leave_the_server(engines: dict[str, Any]):
    for version in range(20):
        await live(engines, version=version, seed=version)
        await engines["solver"].generate(PROMPT, knobs(2))
    async with asyncio.timeout(30):
        while len(await known_adapters(engines["solver"])) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert (await engines["solver"].generate(PROMPT, knobs(3))).version_spans[0].version == 19


async def test_what_does_not_fit_is_refused_and_the_old_version_serves_on(
    engines: dict[str, Any],
):
    given = await live(engines)
    name = min(given["solver"])
    broken = {
        "not finite": {name: np.full_like(given["solver"][name], np.nan)},
        "has shape": {name: np.zeros((3, 3), "f4")},
        "no tensor lm_head.weight": {"lm_head.weight": np.zeros((14, 32), "f4")},
    }
    for message, tensors in broken.items():
        with pytest.raises(AstraflowError, match=message) as caught:
            await engines["solver"].swap(update("solver", 1, tensors, base=0))
        assert caught.value.reason is Reason.APPLY_FAILED
    assert versions(await engines["solver"].generate(PROMPT, knobs(3))) == [0]


async def test_a_killed_server_comes_back_with_the_adapters_of_the_node(kind: str, model: Any):
    others = processes_below()
    settings = EngineSettings(kind=kind, device="cpu", max_batch=8)
    engines: dict[str, Any] = dict(build_adapter_engines(model.folder, settings, POLICIES))
    try:
        await live(engines)
        await live(engines, version=1, seed=5)
        before = [await e.generate(PROMPT, knobs(temperature=0.0)) for e in engines.values()]
        task = await begun(engines["solver"])
        life = engines["solver"]._host.server.life
        what_computes(processes_below() - others).kill()
        with pytest.raises(AstraflowError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_FAILED
        async with asyncio.timeout(500):
            await life.over
            while {engine.version for engine in engines.values()} != {1}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        after = [await e.generate(PROMPT, knobs(temperature=0.0)) for e in engines.values()]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old.tokens, new.tokens)
    finally:
        for engine in engines.values():
            await engine.close()
