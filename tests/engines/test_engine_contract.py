"""What every engine must do; an engine joins with one line in `ENGINES`.

Servers are real: one is started for all tests of its make, each test attaches to it, and what a
test leaves in it is overwritten by the next. What only the embedded engine promises (several
versions at once, its own draws) is asked of it alone.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import TensorUpdate, WeightUpdate
from astraflow.engines.building import build_engine
from astraflow.engines.protocol import Engine, Generation

POLICY = "sort"
# More than an update takes on any machine: what is this long ends otherwise.
LENGTH = 8000
BELL = 13
ENGINES = [
    "embedded",
    pytest.param("vllm", marks=pytest.mark.vllm),
    pytest.param("sglang", marks=pytest.mark.sglang),
]
embedded_law = pytest.mark.parametrize("start", ["embedded"], indirect=True)

Start = Callable[..., Awaitable[Engine]]


@pytest.fixture
def model(long_model: Any) -> Any:
    return long_model


@pytest.fixture(params=ENGINES)
async def start(
    request: pytest.FixtureRequest, model: Any, server_url: Callable[[str], str]
) -> AsyncIterator[Start]:
    """Starts engines; with version 0 (seed 0) live unless told otherwise."""
    kind: str = request.param
    url = None if kind == "embedded" else await asyncio.to_thread(server_url, kind)
    engines: list[Engine] = []

    async def start(*, is_live: bool = True, **settings: Any) -> Engine:
        told = EngineSettings(kind=kind, url=url, device="cpu", **settings)
        engine = build_engine(model.folder, told, POLICY)
        engines.append(engine)
        if is_live:
            await engine.swap(model.update(0, seed=0))
        return engine

    yield start
    for engine in engines:
        await engine.close()


def knobs(length: int = 12, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": length, "seed": 1, "ignore_eos": True, **fields})


def versions_of(generation: Generation) -> list[int]:
    return [span.version for span in generation.version_spans]


async def started(engine: Engine, length: int = 400, **fields: Any) -> asyncio.Task[Generation]:
    """Return a long generation that has sampled some tokens."""
    task = asyncio.ensure_future(engine.generate([3, 4, 5], knobs(length, seed=7, **fields)))
    await engine.generate([3], knobs(2))
    return task


async def test_without_weights_nothing_is_generated(start: Start):
    engine = await start(is_live=False)
    assert engine.version is None
    with pytest.raises(AstraflowError) as caught:
        await engine.generate([3], knobs())
    assert caught.value.reason is Reason.VERSION_NOT_SERVED


async def test_every_token_has_its_version_and_the_logprob_it_was_sampled_with(
    start: Start, model: Any
):
    engine = await start()
    prompt = [3, 9, 4, 13]
    generation = await engine.generate(prompt, knobs(40))
    assert generation.tokens.dtype == np.int32
    assert generation.logprobs.dtype == np.float32
    assert [(span.version, span.length) for span in generation.version_spans] == [(0, 40)]
    assert generation.finish_reason is FinishReason.LENGTH
    expected = model.logprobs(0, prompt, generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


async def test_greedy_takes_the_likeliest_with_certainty(start: Start, model: Any):
    engine = await start()
    generation = await engine.generate([3, 4], knobs(10, temperature=0.0))
    for token in range(2, 14):
        other = np.where(np.arange(10) == 9, token, generation.tokens)
        taken = model.logprobs(0, [3, 4], generation.tokens)[9]
        assert model.logprobs(0, [3, 4], other)[9] <= taken
    assert not generation.logprobs.any()


@embedded_law
async def test_a_seed_gives_the_same_tokens_in_any_company(start: Start):
    engine = await start(max_batch=5)
    prompts = [[3 + (i * j) % 11 for j in range(1, 2 + 3 * i)] for i in range(12)]
    asked = [knobs(5 + 3 * i, seed=i) for i in range(12)]
    alone = [await engine.generate(p, s) for p, s in zip(prompts, asked, strict=True)]
    together = await asyncio.gather(*map(engine.generate, reversed(prompts), reversed(asked)))
    for one, other in zip(alone, reversed(together), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


async def test_without_a_seed_two_completions_differ(start: Start):
    engine = await start()
    one, other = await asyncio.gather(
        *(engine.generate([3], knobs(64, seed=None)) for _ in range(2))
    )
    assert one.tokens.tolist() != other.tokens.tolist()


async def test_an_end_token_is_kept_and_ends(start: Start):
    engine = await start()
    generations = await asyncio.gather(
        *(engine.generate([3], knobs(100, seed=s, ignore_eos=False)) for s in range(8))
    )
    ended = [g for g in generations if g.finish_reason is FinishReason.STOP]
    assert ended
    for generation in ended:
        assert generation.tokens[-1] == 2
        assert 2 not in generation.tokens[:-1]


async def test_a_stop_id_ends(start: Start):
    engine = await start()
    free = await engine.generate([3], knobs(60, temperature=0.0))
    stop = int(free.tokens[20])
    first = free.tokens.tolist().index(stop)
    generation = await engine.generate([3], knobs(60, temperature=0.0, stop_token_ids=(stop,)))
    assert generation.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert generation.finish_reason is FinishReason.STOP


async def test_an_end_token_that_is_ignored_does_not_end_what_another_one_may(start: Start):
    engine = await start()
    sampling = knobs(200, stop_token_ids=(BELL,), temperature=1.5)
    # Some servers draw by seeds of their own: until the ignored token was among what they drew.
    for first in range(0, 160, 8):
        generations = await asyncio.gather(
            *(engine.generate([3], replace(sampling, seed=first + s)) for s in range(8))
        )
        for generation in generations:
            assert generation.tokens[-1] == BELL or len(generation.tokens) == 200
            assert BELL not in generation.tokens[:-1]
        if any(2 in generation.tokens for generation in generations):
            return
    pytest.fail("the end token that is ignored was never drawn")


async def test_nothing_stops_before_the_least_length(start: Start):
    engine = await start()
    sampling = knobs(40, ignore_eos=False, min_new_tokens=30, stop_token_ids=(5,))
    generations = await asyncio.gather(
        *(engine.generate([3], replace(sampling, seed=s)) for s in range(6))
    )
    for generation in generations:
        assert len(generation.tokens) >= 30
        assert not {2, 5} & set(generation.tokens[:30].tolist())


@embedded_law
async def test_padding_and_beginning_are_never_sampled(start: Start):
    engine = await start()
    generation = await engine.generate([3], knobs(100, temperature=50.0))
    assert generation.tokens.min() >= 2


async def test_the_context_bounds_prompt_and_completion(start: Start):
    engine = await start(max_context=32)
    assert engine.max_context_token_count == 32
    generation = await engine.generate([3] * 30, knobs(0))
    assert len(generation.tokens) == 2
    with pytest.raises(AstraflowError) as caught:
        await engine.generate([3] * 32, knobs())
    assert caught.value.reason is Reason.CONTEXT_TOO_LONG


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"stop_token_ids": (99,)}]
)
async def test_knobs_that_cannot_be_honoured_are_named(start: Start, wrong: dict[str, Any]):
    engine = await start()
    with pytest.raises(AstraflowError) as caught:
        await engine.generate([3], knobs(**wrong))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata["field"] == f"sampling.{next(iter(wrong))}"


@pytest.mark.parametrize("prompt", [[], [14], [-1]])
async def test_a_prompt_of_unknown_ids_is_refused(start: Start, prompt: list[int]):
    engine = await start()
    with pytest.raises(AstraflowError) as caught:
        await engine.generate(prompt, knobs())
    assert caught.value.reason is Reason.INVALID_FIELD


async def test_a_swap_in_flight_splits_the_spans_and_keeps_the_generation(start: Start, model: Any):
    engine = await start()
    new = model.update(1, seed=1, rings=True)
    await engine.swap(model.update(0, seed=0, rings=False))
    task = await started(engine, LENGTH, stop_token_ids=(BELL,))
    report = await engine.swap(new)
    generation = await task
    assert (report.version, report.inflight_count) == (1, 1)
    assert report.pause_s >= 0
    assert engine.version == 1
    assert versions_of(generation) == [0, 1]
    before = generation.version_spans[0].length
    old = model.logprobs(0, [3, 4, 5], generation.tokens[:before], rings=False)
    # Up to thousands of tokens: a slow swap leaves more of them, and f32 rounds over as many keys.
    np.testing.assert_allclose(generation.logprobs[:before], old, atol=1e-5, rtol=1e-5)


async def test_a_swap_changes_what_is_sampled(start: Start, model: Any):
    engine = await start()
    await engine.swap(model.update(1, seed=1))
    generation = await engine.generate([3, 4], knobs(20))
    expected = model.logprobs(1, [3, 4], generation.tokens)
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
    assert versions_of(generation) == [1]


@embedded_law
async def test_a_sparse_update_equals_the_dense_one(start: Start, model: Any):
    engine, other = await start(), await start()
    old, new = model.bits(0), model.bits(1)
    parts: list[TensorUpdate] = []
    mixed = dict(old)
    for part in model.update(1, seed=1).tensors[:4]:
        name = part.spec.name
        indices = np.arange(0, part.spec.element_count, 3)
        mixed[name] = old[name].copy()
        mixed[name].reshape(-1)[indices] = new[name].reshape(-1)[indices]
        parts.append(replace(part, indices=indices, values=new[name].reshape(-1)[indices]))
    await engine.swap(replace(model.update(1, seed=1), base_version=0, tensors=tuple(parts)))
    whole = tuple(
        replace(part, values=mixed[part.spec.name].reshape(-1))
        for part in model.update(1, seed=1).tensors
    )
    await other.swap(replace(model.update(1, seed=1), tensors=whole))
    one = await engine.generate([3], knobs(30))
    same = await other.generate([3], knobs(30))
    np.testing.assert_array_equal(one.tokens, same.tokens)
    np.testing.assert_array_equal(one.logprobs, same.logprobs)


async def assert_speaks_alike(one: Engine, other: Engine):
    left, right = await asyncio.gather(*(e.generate([3, 4], knobs(30)) for e in (one, other)))
    np.testing.assert_array_equal(left.tokens, right.tokens)
    np.testing.assert_array_equal(left.logprobs, right.logprobs)


@embedded_law
async def test_swaps_while_many_generate_abort_none_and_are_told_in_the_spans(
    start: Start, model: Any
):
    engine, other = await start(), await start(is_live=False)
    await other.swap(model.merged([1, 2, 3]))
    tasks = [
        asyncio.ensure_future(engine.generate([3 + seed], knobs(150, seed=seed)))
        for seed in range(8)
    ]
    for version in (1, 2, 3):
        await engine.generate([3], knobs(2))
        report = await engine.swap(model.sparse(version, base=version - 1))
        assert report.inflight_count == 8
    for generation in await asyncio.gather(*tasks):
        assert generation.finish_reason is FinishReason.LENGTH
        assert len(generation.tokens) == 150
        assert versions_of(generation) == [0, 1, 2, 3]
        assert {span.kv for span in generation.version_spans[1:]} == {KvPolicy.KEEP}
    await assert_speaks_alike(engine, other)


@embedded_law
async def test_a_recomputed_cache_is_that_of_the_new_version(start: Start, model: Any):
    engine = await start(kv="recompute")
    update = model.update(1, seed=1)
    tasks = [await started(engine, 60 + 20 * n) for n in range(3)]
    await engine.swap(update)
    for generation in await asyncio.gather(*tasks):
        first, second = generation.version_spans
        assert (first.kv, second.kv) == (KvPolicy.UNKNOWN, KvPolicy.RECOMPUTE)
        new = model.logprobs(1, [3, 4, 5], generation.tokens)
        np.testing.assert_allclose(
            generation.logprobs[first.length :], new[first.length :], atol=1e-5
        )


@pytest.mark.slow
@embedded_law
async def test_a_version_that_comes_again_is_harmless(start: Start, model: Any):
    engine, other = await start(), await start(is_live=False)
    await other.swap(model.merged([1]))
    update = model.sparse(1, base=0)
    task = await started(engine)
    for _ in range(2):
        await engine.swap(update)
    assert versions_of(await task) == [0, 1]
    await assert_speaks_alike(engine, other)


@embedded_law
async def test_pinned_versions_keep_their_bits_under_sparse_updates(start: Start, model: Any):
    engine, other = await start(), await start(is_live=False)
    await engine.pin(0)
    before = await engine.generate([3], knobs(40))
    await engine.swap(model.sparse(1, base=0))
    await engine.pin(1)
    first = await engine.generate([3], knobs(40))
    for version in (2, 3):
        await engine.swap(model.sparse(version, base=version - 1))
    again, second = await asyncio.gather(
        *(engine.generate([3], knobs(40), version=version) for version in (0, 1))
    )
    np.testing.assert_array_equal(again.logprobs, before.logprobs)
    np.testing.assert_array_equal(second.logprobs, first.logprobs)
    await engine.unpin(0)
    await engine.swap(model.sparse(4, base=3))
    await other.swap(model.merged([1, 2, 3, 4]))
    await assert_speaks_alike(engine, other)


@embedded_law
async def test_a_pin_that_comes_with_a_swap_keeps_the_old_bits_or_is_refused(
    start: Start, model: Any
):
    engine = await start()
    before = await engine.generate([3], knobs(40))
    swap = asyncio.ensure_future(engine.swap(model.sparse(1, base=0)))
    await asyncio.sleep(0)
    try:
        await engine.pin(0)
    except AstraflowError as error:
        assert error.reason is Reason.VERSION_NOT_SERVED  # noqa: PT017  both are sound
    else:
        pinned = await engine.generate([3], knobs(40), version=0)
        np.testing.assert_array_equal(pinned.logprobs, before.logprobs)
    assert (await swap).version == 1


@embedded_law
async def test_a_swap_that_is_cancelled_happens_whole_or_not_at_all(start: Start, model: Any):
    engine, other = await start(), await start()
    update = model.sparse(1, base=0)
    swap = asyncio.ensure_future(engine.swap(update))
    await asyncio.sleep(0)
    swap.cancel()
    await asyncio.wait([swap])
    for part in update.tensors:
        part.values[:] = 0
    if engine.version == 1:
        await other.swap(model.merged([1]))
    await assert_speaks_alike(engine, other)


def _unknown(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    first = update.tensors[0]
    odd = replace(first, spec=replace(first.spec, name="model.other"))
    return replace(update, tensors=(*update.tensors[1:], odd)), "model.other"


def _misshapen(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    last = update.tensors[-1]
    odd = replace(last, spec=replace(last.spec, shape=(3, 5)), values=last.values[:15])
    return replace(update, tensors=(*update.tensors[:-1], odd)), last.spec.name


def _short(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    last = update.tensors[-1]
    odd = replace(last, values=last.values[:-1])
    return replace(update, tensors=(*update.tensors[:-1], odd)), last.spec.name


def _incomplete(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    return replace(update, tensors=update.tensors[:-1]), update.tensors[-1].spec.name


def _beyond(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    last = update.tensors[-1]
    count = last.spec.element_count
    odd = replace(last, indices=np.array([0, count]), values=last.values[:2])
    return replace(update, base_version=0, tensors=(odd,)), last.spec.name


def _falling(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    last = update.tensors[-1]
    odd = replace(last, indices=np.array([1, 0]), values=last.values[:2])
    return replace(update, base_version=0, tensors=(odd,)), last.spec.name


def _wrong_base(update: WeightUpdate) -> tuple[WeightUpdate, str]:
    return replace(update, base_version=5), "5"


@pytest.mark.parametrize(
    "spoil", [_unknown, _misshapen, _short, _incomplete, _beyond, _falling, _wrong_base]
)
async def test_an_update_that_does_not_fit_changes_nothing(
    start: Start, model: Any, spoil: Callable[[WeightUpdate], tuple[WeightUpdate, str]]
):
    engine = await start()
    update, named = spoil(model.update(1, seed=1))
    with pytest.raises(AstraflowError) as caught:
        await engine.swap(update)
    assert caught.value.reason is Reason.APPLY_FAILED
    assert named in caught.value.message
    after = await engine.generate([3], knobs(20))
    assert versions_of(after) == [engine.version] == [0]
    expected = model.logprobs(0, [3], after.tokens)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-5)


async def test_an_update_of_another_policy_is_refused(start: Start, model: Any):
    engine = await start()
    with pytest.raises(AstraflowError) as caught:
        await engine.swap(replace(model.update(1, seed=1), policy_id="other"))
    assert caught.value.reason is Reason.APPLY_FAILED


async def test_an_engine_does_not_hold_on_to_the_arrays_of_an_update(start: Start, model: Any):
    engine = await start(is_live=False)
    update = model.update(0, seed=0)
    await engine.swap(update)
    for part in update.tensors:
        part.values[:] = 0
    after = await engine.generate([3], knobs(20))
    expected = model.logprobs(0, [3], after.tokens)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-5)


@embedded_law
async def test_a_pinned_version_serves_on_beside_the_live_one(start: Start, model: Any):
    engine = await start()
    before = await engine.generate([3], knobs(50))
    await engine.pin(0)
    await engine.swap(model.update(1, seed=1))
    pinned, live = await asyncio.gather(
        engine.generate([3], knobs(50), version=0), engine.generate([3], knobs(50))
    )
    assert engine.pinned_versions == {0}
    np.testing.assert_array_equal(pinned.tokens, before.tokens)
    assert (versions_of(pinned), versions_of(live)) == ([0], [1])


@embedded_law
async def test_a_generation_of_the_live_version_stays_with_it(start: Start, model: Any):
    engine = await start()
    task = asyncio.ensure_future(engine.generate([3], knobs(120), version=0))
    await engine.generate([3], knobs(2))
    await engine.swap(model.update(1, seed=1))
    assert versions_of(await task) == [0]


@embedded_law
async def test_pins_are_counted(start: Start, model: Any):
    engine = await start()
    await engine.pin(0)
    await engine.pin(0)
    await engine.swap(model.update(1, seed=1))
    await engine.unpin(0)
    await engine.generate([3], knobs(3), version=0)
    await engine.unpin(0)
    assert engine.pinned_versions == frozenset()
    for call in (engine.pin(0), engine.generate([3], knobs(3), version=0)):
        with pytest.raises(AstraflowError) as caught:
            await call
        assert caught.value.reason is Reason.VERSION_NOT_SERVED


@embedded_law
async def test_unpinning_lets_running_generations_end(start: Start, model: Any):
    engine = await start()
    await engine.pin(0)
    await engine.swap(model.update(1, seed=1))
    task = asyncio.ensure_future(engine.generate([3], knobs(100), version=0))
    await engine.generate([3], knobs(2), version=0)
    await engine.unpin(0)
    assert versions_of(await task) == [0]


async def test_a_cancelled_generation_frees_its_place(start: Start):
    engine = await start(max_batch=1)
    long = asyncio.ensure_future(engine.generate([3], knobs(500)))
    next_one = asyncio.ensure_future(engine.generate([4], knobs(3)))
    long.cancel()
    assert len((await next_one).tokens) == 3
    assert long.cancelled() or (await asyncio.wait([long]))[0]
    assert engine.load().running_count == 0


async def test_the_load_counts_what_runs_and_what_was_sampled(start: Start):
    engine = await start()
    idle = engine.load()
    await asyncio.gather(*(engine.generate([3], knobs(10, seed=s)) for s in range(4)))
    load = engine.load()
    assert load.sampled_token_count - idle.sampled_token_count == 40
    assert load.busy_s > idle.busy_s
    assert (load.running_count, load.queued_count, load.kv_fraction) == (0, 0, 0.0)


@embedded_law
async def test_weights_that_are_not_finite_fail_the_generation_and_not_the_engine(
    start: Start, model: Any
):
    engine = await start()
    spoilt = model.update(1, seed=1)
    for part in spoilt.tensors:
        part.values[:] = 0x7FC00000
    await engine.swap(spoilt)
    with pytest.raises(AstraflowError) as caught:
        await engine.generate([3], knobs())
    assert caught.value.reason is Reason.ENGINE_FAILED
    await engine.swap(model.update(2, seed=1))
    assert versions_of(await engine.generate([3], knobs())) == [2]


async def test_closing_ends_what_runs_and_refuses_what_comes(start: Start, model: Any):
    engine = await start()
    task = await started(engine, LENGTH)
    await engine.close()
    for call in (task, engine.generate([3], knobs()), engine.swap(model.update(1, seed=1))):
        with pytest.raises(AstraflowError) as caught:
            await call
        assert caught.value.reason is Reason.ENGINE_FAILED


async def test_who_watches_is_told_what_is_sampled_in_its_order(start: Start):
    engine = await start()
    told: list[np.ndarray] = []
    greedy = knobs(200, temperature=0.0)
    sampled = await engine.generate([3, 4], greedy, watch=told.append)
    shown = np.concatenate(told)
    assert 0 < len(shown) <= 200
    assert np.array_equal(shown, sampled.tokens[: len(shown)])
    unwatched = await engine.generate([3, 4], greedy)
    assert np.array_equal(unwatched.tokens, sampled.tokens)
