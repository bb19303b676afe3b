"""The worker: commits that fail halfway, beside generations that go on."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import WeightUpdate
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.embedded.weights import Staged, stage

LENGTH = 120


@pytest.fixture
async def engine(model, kv):
    settings = EngineSettings(device="cpu", kv=kv)
    engine = EmbeddedEngine.from_directory(model.folder, settings, "sort")
    await engine.swap(model.update(0, seed=0))
    yield engine
    await engine.close()


def sparse(model) -> WeightUpdate:
    whole = model.update(1, seed=1)
    parts = tuple(
        replace(part, indices=np.arange(0, part.spec.element_count, 16), values=part.values[::16])
        for part in whole.tensors
    )
    return replace(whole, base_version=0, tensors=parts)


def spoilt(staged: Staged) -> Staged:
    """Return what fails at its last tensor, once all others are written."""
    *others, last = staged.scatters
    return replace(staged, scatters=(*others, replace(last, new=last.new.double())))


def misshapen(staged: Staged) -> Staged:
    """Return what is applied whole, and then cannot be computed with."""
    tensors = dict(staged.weights.tensors)
    tensors["model.norm.weight"] = torch.ones(5)
    return replace(staged, weights=replace(staged.weights, tensors=tensors))


async def commit(engine: EmbeddedEngine, staged: Staged):
    return await engine._base.worker.commit(staged)


def knobs() -> SamplingParams:
    return SamplingParams(max_new_tokens=LENGTH, seed=3, ignore_eos=True)


@pytest.mark.parametrize(
    ("kv", "spoil"), [("keep", spoilt), ("recompute", spoilt), ("recompute", misshapen)]
)
async def test_a_commit_that_fails_in_the_middle_leaves_no_trace(engine, model, spoil):
    expected = await engine.generate([3, 4], knobs())
    task = asyncio.ensure_future(engine.generate([3, 4], knobs()))
    await engine.generate([5], replace(knobs(), max_new_tokens=2))
    staged = stage(sparse(model), engine._slots, engine._versions.weights)
    before = {name: each.clone() for name, each in engine._versions.weights.tensors.items()}
    with pytest.raises(AstraflowError, match="version 1 cannot be applied") as caught:
        await commit(engine, spoil(staged))
    assert caught.value.reason is Reason.APPLY_FAILED
    assert engine.version == 0
    for name, tensor in engine._versions.weights.tensors.items():
        assert torch.equal(tensor, before[name])
    generation = await task
    assert [(span.version, span.length) for span in generation.version_spans] == [(0, LENGTH)]
    np.testing.assert_array_equal(generation.tokens, expected.tokens)
    assert (await engine.swap(sparse(model))).version == 1


@pytest.mark.parametrize("kv", ["keep"])
async def test_a_commit_staged_before_a_pin_is_sent_back(engine, model):
    staged = stage(sparse(model), engine._slots, engine._versions.weights)
    await engine.pin(0)
    assert await commit(engine, staged) is None
    assert engine.version == 0
    await engine.swap(sparse(model))
    assert engine._versions.weights.tensors.keys() == staged.weights.tensors.keys()
    assert engine.version == 1


def broken() -> None:
    raise RuntimeError("a defect")


@pytest.mark.parametrize("kv", ["keep"])
async def test_a_thread_that_broke_tells_the_node_with_its_next_sign_of_life(engine):
    assert engine.load().running_count == 0
    engine._base.worker._put((), broken)
    with pytest.raises(AstraflowError, match="the engine broke"):
        await engine.generate([3, 4], knobs())
    with pytest.raises(AstraflowError, match="a defect") as told:
        engine.load()
    assert told.value.reason is Reason.ENGINE_FAILED


@pytest.mark.parametrize("kv", ["keep"])
async def test_what_was_asked_as_the_thread_broke_is_answered(engine):
    worker = engine._base.worker
    asked = asyncio.ensure_future(engine.generate([3, 4], knobs()))
    await asyncio.sleep(0)
    # It was not handed over yet.
    worker._inbox.put(((), broken))
    worker.join()
    with pytest.raises(AstraflowError, match="a defect"):
        await asked


@pytest.mark.parametrize("kv", ["keep"])
async def test_who_waits_for_what_broke_the_thread_is_told(engine, model):
    staged = spoilt(stage(sparse(model), engine._slots, engine._versions.weights))
    *others, last = staged.scatters
    torn = replace(staged, scatters=(*others, replace(last, old=last.old.double())))
    with pytest.raises(AstraflowError, match="the engine broke"):
        await commit(engine, torn)


@pytest.mark.parametrize("kv", ["keep"])
async def test_a_device_that_computes_no_more_breaks_the_engine(engine, monkeypatch):
    def forward(**_):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(engine._base.module, "forward", forward)
    asked = [engine.generate([3, 4], knobs()), engine.generate([3, 4, 5], knobs())]
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert ["the engine broke" in str(each) for each in errors] == [True, True]
    with pytest.raises(AstraflowError, match="device-side assert"):
        engine.load()
