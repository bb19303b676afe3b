"""What every engine over a server must do; the servers are real."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.engines.building import build_engine
from astraflow.rpc.concurrency import beside
from tests.engines.processes import processes_below, what_computes

POLICY = "sort"
# More than an update takes on any machine: what is this long ends otherwise.
LENGTH = 8000
# Of tests that wait for two servers, one after the other.
two_starts = pytest.mark.timeout(1200)
BELL = 13
KINDS = [
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("sglang", marks=pytest.mark.sglang),
]

Start = Callable[..., Awaitable[Any]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(long_model: Any) -> Any:
    return long_model


@pytest.fixture
async def engine(kind: str, model: Any, server_url: Callable[[str], str]) -> AsyncIterator[Any]:
    """Attached to a server, with version 0 (seed 0) live."""
    url = await asyncio.to_thread(server_url, kind)
    engine: Any = build_engine(model.folder, EngineSettings(kind=kind, url=url), POLICY)
    await engine.swap(model.update(0, seed=0))
    yield engine
    await engine.close()


def knobs(length: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": length, "seed": 1, "ignore_eos": True, **fields})


async def running(engine: Any, count: int, length: int, **fields: Any) -> list[asyncio.Task[Any]]:
    """Return generations of which each has begun."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [
        asyncio.ensure_future(
            engine.generate(
                [3 + n], knobs(length, seed=n, **fields), watch=lambda _, e=event: e.set()
            )
        )
        for n, event in enumerate(begun)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    return tasks


@asynccontextmanager
async def busy(engine: Any) -> AsyncGenerator[None]:
    """Let something run all the while."""
    begun = asyncio.Event()

    async def generate() -> None:
        while True:
            await engine.generate([3], knobs(LENGTH), watch=lambda _: begun.set())

    async with beside(generate()):
        await begun.wait()
        yield


async def test_greedy_takes_what_transformers_takes(engine: Any, model: Any):
    prompt = [3, 9, 4, 13]
    generation = await engine.generate(prompt, knobs(60, temperature=0.0))
    reference = model.reference(0)
    reference.generation_config.update(suppress_tokens=[0, 1], eos_token_id=None)
    ids = torch.tensor([prompt])
    expected = reference.generate(ids, max_new_tokens=60, do_sample=False)[0, len(prompt) :]
    assert generation.tokens.tolist() == expected.tolist()


async def test_sparse_updates_leave_what_loading_all_leaves(engine: Any, model: Any):
    for version in (1, 2, 3):
        await engine.swap(model.sparse(version, base=version - 1))
    patched = await engine.checksums()
    await engine.swap(model.update(4, seed=9))
    assert await engine.checksums() != patched
    await engine.swap(model.merged([1, 2, 3]))
    assert await engine.checksums() == patched


async def test_swaps_in_flight_abort_none_and_every_token_tells_its_version(
    engine: Any, model: Any
):
    updates = [model.sparse(version, base=version - 1, rings=False) for version in (1, 2)]
    last = model.update(3, seed=3, rings=True)
    await engine.swap(model.update(0, seed=0, rings=False))
    tasks = await running(engine, 8, LENGTH, stop_token_ids=(BELL,))
    for update in updates:
        # Those that run are decoded in the same steps.
        await engine.generate([3], knobs(2))
        report = await engine.swap(update)
        assert (report.version, report.inflight_count) == (update.version, 8)
    await engine.generate([3], knobs(2))
    await engine.swap(last)
    for number, generation in enumerate(await asyncio.gather(*tasks)):
        assert generation.finish_reason is FinishReason.STOP
        assert [span.version for span in generation.version_spans] == [0, 1, 2, 3]
        assert {span.kv for span in generation.version_spans[1:]} == {KvPolicy.KEEP}
        assert generation.version_spans[-1].length == 1
        first = generation.version_spans[0].length
        old = model.logprobs(0, [3 + number], generation.tokens, rings=False)
        np.testing.assert_allclose(generation.logprobs[:first], old[:first], atol=1e-4)
        assert np.abs(generation.logprobs[first:-1] - old[first:-1]).max() > 0.01


async def test_what_runs_is_read_anew_where_the_recipe_says_so(
    kind: str, model: Any, server_url: Callable[[str], str]
):
    url = await asyncio.to_thread(server_url, kind)
    settings = EngineSettings(kind=kind, url=url, kv="recompute")
    engine: Any = build_engine(model.folder, settings, POLICY)
    try:
        updates = [
            model.update(n + 1, seed=1, rings=rings) for n, rings in enumerate([False, True])
        ]
        await engine.swap(model.update(0, seed=0, rings=False))
        tasks = await running(engine, 3, LENGTH, stop_token_ids=(BELL,))
        for update in updates:
            await engine.swap(update)
            await engine.generate([3], knobs(2))
        for number, generation in enumerate(await asyncio.gather(*tasks)):
            assert [span.version for span in generation.version_spans] == [0, 1, 2]
            assert {span.kv for span in generation.version_spans[1:]} == {KvPolicy.RECOMPUTE}
            new = model.logprobs(1, [3 + number], generation.tokens, rings=False)
            first, second, _ = (span.length for span in generation.version_spans)
            anew = slice(first, first + second)
            np.testing.assert_allclose(generation.logprobs[anew], new[anew], atol=1e-4)
    finally:
        await engine.close()


async def test_no_prompt_is_read_from_the_cache_of_an_older_version(engine: Any, model: Any):
    prompt = [3 + n % 11 for n in range(300)]
    await engine.generate(prompt, knobs(4))
    # What runs keeps a server from forgetting its cache.
    async with busy(engine):
        await engine.swap(model.update(1, seed=1))
        generation = await engine.generate(prompt, knobs(20))
    expected = model.logprobs(1, prompt, generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


async def test_a_pin_holds_the_next_version_back(engine: Any, model: Any):
    await engine.pin(0)
    swap = asyncio.ensure_future(engine.swap(model.update(1, seed=1)))
    generation = await engine.generate([3], knobs(30), version=0)
    assert [span.version for span in generation.version_spans] == [0]
    assert not swap.done()
    assert engine.pinned_versions == {0}
    await engine.unpin(0)
    assert (await swap).version == 1
    with pytest.raises(AstraflowError) as caught:
        await engine.pin(0)
    assert caught.value.reason is Reason.VERSION_NOT_SERVED


async def test_who_gives_up_frees_the_place_in_the_server(engine: Any):
    tasks = await running(engine, 4, LENGTH)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(30):
        while (await engine._dialect.load(engine._server.http)).running_count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_more_than_fit_are_served_in_turn(engine: Any):
    generations = await asyncio.gather(
        *(engine.generate([3 + n % 11], knobs(3, seed=n)) for n in range(300))
    )
    assert {len(generation.tokens) for generation in generations} == {3}


async def test_padding_and_beginning_are_not_sampled(engine: Any):
    generation = await engine.generate([3], knobs(200, temperature=2.0))
    assert generation.tokens.min() >= 2


async def test_weights_that_are_not_finite_are_refused(engine: Any, model: Any):
    spoilt = model.update(1, seed=1)
    spoilt.tensors[-1].values[3] = 0x7FC00000
    with pytest.raises(AstraflowError) as caught:
        await engine.swap(spoilt)
    assert caught.value.reason is Reason.APPLY_FAILED
    assert engine.version == 0
    generation = await engine.generate([3, 4], knobs(20))
    expected = model.logprobs(0, [3, 4], generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


async def test_a_stop_string_ends_and_is_kept(engine: Any):
    free = await engine.generate([3], knobs(60, temperature=0.0))
    # One character per token; the end token, which has no text here, is a space.
    whole = "".join(" s abcdefghij>"[token] for token in free.tokens.tolist())
    text = next(part for part in whole[8:].split(" ") if len(part) > 2)[:3]
    generation = await engine.generate([3], knobs(60, temperature=0.0, stop_strings=(text,)))
    assert len(generation.tokens) == whole.index(text) + len(text)
    assert generation.finish_reason is FinishReason.STOP


async def assert_restored(engine: Any, version: int, before: Any) -> None:
    """Wait until a version is live again, and ask what was asked of it before."""
    while engine.version != version:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    after = await engine.generate([3, 4], knobs(20, temperature=0.0))
    np.testing.assert_array_equal(before.tokens, after.tokens)


@two_starts
async def test_a_killed_server_comes_back_with_the_weights_of_the_node(kind: str, model: Any):
    others = processes_below()
    engine: Any = build_engine(
        model.folder, EngineSettings(kind=kind, device="cpu", max_batch=8), POLICY
    )
    try:
        engine.restore_from(lambda: model.update(1, seed=1))
        await engine.swap(model.update(0, seed=0))
        await engine.swap(model.update(1, seed=1))
        before = await engine.generate([3, 4], knobs(20, temperature=0.0))
        (task,) = await running(engine, 1, LENGTH)
        life = engine._server.life
        what_computes(processes_below() - others).kill()
        with pytest.raises(AstraflowError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_FAILED
        await life.over
        await assert_restored(engine, 1, before)
    finally:
        await engine.close()


@two_starts
async def test_a_server_that_dies_in_an_update_has_no_version_until_all_is_loaded(
    kind: str, model: Any
):
    others = processes_below()
    engine: Any = build_engine(
        model.folder, EngineSettings(kind=kind, device="cpu", max_batch=8), POLICY
    )
    try:
        engine.restore_from(lambda: model.update(0, seed=0))
        await engine.swap(model.update(0, seed=0))
        before = await engine.generate([3, 4], knobs(20, temperature=0.0))
        await engine.pin(0)
        swap = asyncio.ensure_future(engine.swap(model.update(1, seed=1)))
        holds, server = engine._holds, what_computes(processes_below() - others)
        while not holds.is_awaited:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        # All is staged. It hears of the change, and can do nothing of it.
        server.suspend()
        await engine.unpin(0)
        while not holds.is_changing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        server.kill()
        with pytest.raises(AstraflowError, match="version 1 was not applied whole") as caught:
            await swap
        assert caught.value.reason is Reason.APPLY_FAILED
        assert engine.version is None
        await assert_restored(engine, 0, before)
    finally:
        await engine.close()
