"""Several policies as adapters on one base model."""

import asyncio

import numpy as np
import pytest
import torch
from torch import nn

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.embedded.adapters import (
    AdapterSlots,
    add_adapter_places,
    places_of,
    row_scales,
)
from astraflow.engines.embedded.engine import adapter_engines
from astraflow.engines.embedded.weights import Weights
from tests.engines.adapter_updates import (
    POLICIES,
    PROMPT,
    adapters,
    expected,
    knobs,
    update,
)


@pytest.fixture
async def engines(model):
    made = adapter_engines(model.folder, EngineSettings(device="cpu"), POLICIES)
    yield made
    for engine in made.values():
        await engine.close()


async def live(engines, version=0, seed=0):
    """Give both policies adapters; return them."""
    given = {}
    for index, (policy, engine) in enumerate(engines.items()):
        given[policy] = adapters(engine.named_tensors, seed + index)
        await engine.swap(update(policy, version, given[policy]))
    return given


class OneLayer(nn.Module):
    """As much of a model as adapters look at."""

    def get_output_embeddings(self):
        return None


def test_rows_take_their_own_adapters_as_merged_weights_say():
    """In float64: row by row W x + b + s B A x."""
    module, plain = OneLayer(), nn.Linear(6, 5, dtype=torch.float64)
    module.layer = plain
    places = places_of(list(POLICIES.values()))
    add_adapter_places(module, places)
    rng = np.random.default_rng(0)
    weights = []
    for place in places:
        slots = AdapterSlots(module, place)
        tensors = {n: torch.from_numpy(rng.normal(size=s)) for n, s in slots.shapes.items()}
        slots.install(Weights(version=0, tensors=tensors, adapter=place.index))
        weights.append((place.settings.scale, *tensors.values()))
    policies = np.array([0, 1, 1, 0, 1])
    module.adapter_shares.of_rows = row_scales(module, places)[policies]
    inputs = torch.from_numpy(rng.normal(size=(5, 3, 6)))
    found = module.layer(inputs)
    for row, policy in enumerate(policies):
        scale, first, second = weights[policy]
        merged = plain.weight + scale * second @ first
        wanted = nn.functional.linear(inputs[row], merged, plain.bias)
        torch.testing.assert_close(found[row], wanted, rtol=1e-9, atol=1e-12)


async def test_one_step_serves_both_policies_each_with_its_own(engines, model):
    given = await live(engines)
    asked = [(policy, seed) for seed in range(3) for policy in engines]
    found = await asyncio.gather(
        *(engines[policy].generate(PROMPT, knobs(seed=seed)) for policy, seed in asked)
    )
    for (policy, _), one in zip(asked, found, strict=True):
        wanted = expected(model, policy, given[policy], one.tokens)
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-5)
    alone = await engines["solver"].generate(PROMPT, knobs(seed=0))
    np.testing.assert_array_equal(alone.tokens, found[0].tokens)
    np.testing.assert_array_equal(alone.logprobs, found[0].logprobs)


async def test_the_base_is_in_memory_once_and_has_no_place_in_updates(engines, model):
    solver, verifier = engines.values()
    assert solver._base is verifier._base
    module = solver._base.module
    base_count = sum(p.numel() for p in model.reference(0).parameters())
    adapter_count = sum(int(np.prod(s)) for e in engines.values() for s in e.named_tensors.values())
    assert sum(p.numel() for p in module.parameters()) == base_count + adapter_count
    name, values = "model.embed_tokens.weight", np.zeros((14, 32), "f4")
    with pytest.raises(AstraflowError, match=f"no tensor {name}") as caught:
        await solver.swap(update("solver", 0, {name: values}))
    assert caught.value.reason is Reason.APPLY_FAILED


async def test_a_swap_of_one_policy_leaves_the_other_as_it_is(engines, model):
    given = await live(engines)
    long = asyncio.ensure_future(engines["verifier"].generate(PROMPT, knobs(150)))
    before = await engines["verifier"].generate(PROMPT, knobs(20))
    changed = adapters(engines["solver"].named_tensors, 9)
    report = await engines["solver"].swap(update("solver", 1, changed, base=0))
    assert report.version == 1
    assert (engines["solver"].version, engines["verifier"].version) == (1, 0)
    after = await engines["verifier"].generate(PROMPT, knobs(20))
    np.testing.assert_array_equal(after.logprobs, before.logprobs)
    assert [span.version for span in (await long).version_spans] == [0]
    one = await engines["solver"].generate(PROMPT, knobs())
    assert [span.version for span in one.version_spans] == [1]
    wanted = expected(model, "solver", changed, one.tokens)
    np.testing.assert_allclose(one.logprobs, wanted, atol=1e-5)
    assert not np.allclose(wanted, expected(model, "solver", given["solver"], one.tokens))


async def test_a_sparse_update_changes_the_named_elements(engines):
    given = await live(engines)
    name = min(given["solver"])
    changed = given["solver"][name].copy()
    changed.reshape(-1)[[1, 5]] = [0.5, -0.5]
    await engines["solver"].swap(update("solver", 1, {name: changed}, base=0, indices=[1, 5]))
    live_now = engines["solver"]._versions.weights.tensors[name]
    np.testing.assert_array_equal(live_now.numpy(), changed)
    other = min(given["verifier"])
    untouched = engines["verifier"]._versions.weights.tensors[other]
    np.testing.assert_array_equal(untouched.numpy(), given["verifier"][other])


async def test_a_pinned_version_samples_beside_the_live_one(engines, model):
    given = await live(engines)
    solver = engines["solver"]
    await solver.pin(0)
    await live(engines, version=1, seed=20)
    assert (solver.pinned_versions, engines["verifier"].pinned_versions) == ({0}, frozenset())
    old, new = await asyncio.gather(
        solver.generate(PROMPT, knobs(), version=0), solver.generate(PROMPT, knobs())
    )
    assert [[span.version for span in one.version_spans] for one in (old, new)] == [[0], [1]]
    wanted = expected(model, "solver", given["solver"], old.tokens)
    np.testing.assert_allclose(old.logprobs, wanted, atol=1e-5)
    with pytest.raises(AstraflowError, match="version 0 is not served"):
        await engines["verifier"].generate(PROMPT, knobs(), version=0)
    await solver.unpin(0)


async def test_adapters_that_are_not_finite_are_refused(engines):
    """They would spoil the rows of the other policy."""
    given = await live(engines)
    name = min(given["solver"])
    broken = np.full_like(given["solver"][name], np.nan)
    with pytest.raises(AstraflowError, match=f"{name} of version 1 is not finite") as caught:
        await engines["solver"].swap(update("solver", 1, {name: broken}, base=0))
    assert caught.value.reason is Reason.APPLY_FAILED
    assert engines["solver"].version == 0


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_running_generations_of_a_policy_go_on_with_its_new_version(model, kv):
    settings = EngineSettings(device="cpu", kv=kv)
    engines = adapter_engines(model.folder, settings, POLICIES)
    try:
        await live(engines)
        tasks = {
            policy: asyncio.ensure_future(engine.generate(PROMPT, knobs(150)))
            for policy, engine in engines.items()
        }
        await engines["solver"].generate(PROMPT, knobs(2))
        await engines["solver"].swap(
            update("solver", 1, adapters(engines["solver"].named_tensors, 9), base=0)
        )
        spans = {policy: (await task).version_spans for policy, task in tasks.items()}
    finally:
        for engine in engines.values():
            await engine.close()
    assert [span.version for span in spans["solver"]] == [0, 1]
    assert [span.version for span in spans["verifier"]] == [0]


async def test_loads_are_of_each_policy(engines):
    await live(engines)
    await engines["solver"].generate(PROMPT, knobs(7))
    await engines["verifier"].generate(PROMPT, knobs(5))
    loads = {policy: engine.load() for policy, engine in engines.items()}
    assert [loads[policy].sampled_token_count for policy in POLICIES] == [7, 5]
    assert {load.running_count for load in loads.values()} == {0}
