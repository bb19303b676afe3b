"""Staged updates: what they write, what they leave alone, and the way back."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.embedded.weights import Slots, Staged, Weights, stage

SIZES = {"a": (40, 10), "b": (7,), "c": (1, 1)}


def module_of(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    parameters = {
        name: torch.nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)
        for name, size in SIZES.items()
    }
    return torch.nn.ParameterDict(parameters)


def part(
    name: str, values: np.ndarray, indices: Any = None, dtype: Dtype = Dtype.BF16
) -> TensorUpdate:
    spec = TensorSpec(name=name, dtype=dtype, shape=SIZES[name], offset=0)
    where = None if indices is None else np.array(indices, np.int64)
    return TensorUpdate(spec=spec, indices=where, values=values.astype(dtype.bits))


def update(*parts: TensorUpdate, version: int = 1, base: int | None = 0) -> WeightUpdate:
    return WeightUpdate(
        policy_id=PolicyId("p"), version=version, base_version=base, tensors=tuple(parts)
    )


def whole(rng: np.random.Generator, version: int = 0) -> WeightUpdate:
    parts = (part(name, rng.integers(0, 2**16, int(np.prod(size)))) for name, size in SIZES.items())
    return update(*parts, version=version, base=None)


def bits(weights: Weights) -> dict[str, np.ndarray]:
    return {
        name: tensor.view(torch.int16).numpy().view(np.uint16).reshape(-1).copy()
        for name, tensor in weights.tensors.items()
    }


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, one in left.items():
        np.testing.assert_array_equal(one, right[name], name)


@pytest.fixture
def slots() -> Slots:
    return Slots(module_of())


@pytest.fixture
def live(slots: Slots) -> Weights:
    return stage(whole(np.random.default_rng(0)), slots, None).weights


def test_staging_writes_nothing_live_and_the_commit_writes_in_place(slots: Slots, live: Weights):
    before, tensor = bits(live), live.tensors["a"]
    staged = stage(update(part("a", np.array([7, 8]), [3, 399])), slots, live)
    assert_same(bits(live), before)
    staged.apply()
    assert staged.weights.tensors["a"] is tensor
    before["a"][[3, 399]] = 7, 8
    assert_same(bits(staged.weights), before)


def test_what_is_not_a_number_keeps_its_bits(slots: Slots, live: Weights):
    odd = np.array([0x7FC1, 0xFF81, 0x8000, 0x0001])
    staged = stage(update(part("a", odd, [0, 1, 2, 3])), slots, live)
    staged.apply()
    np.testing.assert_array_equal(bits(staged.weights)["a"][:4], odd)


def test_what_is_not_a_number_beside_a_change_keeps_its_bits(slots: Slots):
    odd = np.arange(400) + 0x7F80
    base = stage(update(part("a", odd), *_rest(), base=None), slots, None).weights
    staged = stage(update(part("a", np.array([7]), [3]), version=2, base=1), slots, base)
    staged.apply()
    odd[3] = 7
    np.testing.assert_array_equal(bits(staged.weights)["a"], odd)


def _rest() -> list[TensorUpdate]:
    return [part("b", np.zeros(7)), part("c", np.zeros(1))]


def test_the_extra_memory_is_no_more_than_the_update(slots: Slots, live: Weights):
    asked = part("a", np.arange(20), np.arange(20))
    (scatter,) = stage(update(asked), slots, live).scatters
    assert asked.indices is not None
    assert scatter.indices.data_ptr() == asked.indices.ctypes.data
    assert scatter.new.data_ptr() == asked.values.ctypes.data
    assert scatter.old.nbytes == asked.values.nbytes


def test_a_tensor_that_mostly_changes_is_made_beside_the_live_one(slots: Slots, live: Weights):
    before = bits(live)
    staged = stage(update(part("a", np.arange(300), np.arange(300))), slots, live)
    assert not staged.scatters
    assert_same(bits(live), before)
    np.testing.assert_array_equal(bits(staged.weights)["a"][:300], np.arange(300))


def test_a_tensor_of_a_kept_version_is_left_alone(slots: Slots, live: Weights):
    before = bits(live)
    staged = stage(update(part("a", np.array([7]), [3])), slots, live, kept=[live])
    assert not staged.scatters
    staged.apply()
    assert_same(bits(live), before)
    assert staged.weights.tensors["b"] is live.tensors["b"]
    assert bits(staged.weights)["a"][3] == 7


def test_a_version_kept_after_staging_is_noticed(slots: Slots, live: Weights):
    staged = stage(update(part("a", np.array([7]), [3])), slots, live)
    assert staged.would_change([live])
    assert not staged.would_change([])
    other = stage(whole(np.random.default_rng(1)), slots, None).weights
    assert not staged.would_change([other])


def spoilt(staged: Staged) -> Staged:
    """Return what fails at its last tensor, after the others were written."""
    *first, last = staged.scatters
    return replace(staged, scatters=(*first, replace(last, new=last.new.double())))


def test_what_fails_in_the_middle_is_undone_bit_for_bit(slots: Slots, live: Weights):
    before = bits(live)
    parts = part("a", np.array([7, 9]), [3, 4])
    good = stage(update(parts), slots, live)
    staged = replace(good, scatters=(*good.scatters, *spoilt(good).scatters))
    with pytest.raises(RuntimeError):
        staged.apply()
    assert bits(live)["a"][3] == 7
    staged.revert()
    assert_same(bits(live), before)


def test_an_update_that_comes_again_changes_nothing(slots: Slots, live: Weights):
    asked = update(part("a", np.array([7]), [3]))
    first = stage(asked, slots, live)
    first.apply()
    after = bits(first.weights)
    again = stage(asked, slots, first.weights)
    again.apply()
    assert_same(bits(again.weights), after)


def test_no_elements_are_no_change(slots: Slots, live: Weights):
    before = bits(live)
    staged = stage(update(part("a", np.zeros(0), [])), slots, live)
    staged.apply()
    assert_same(bits(staged.weights), before)


@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [-1, 3], [3, 400]])
def test_indices_that_do_not_rise_within_the_tensor_are_refused(
    slots: Slots, live: Weights, indices: list[int]
):
    with pytest.raises(AstraflowError, match="a has") as caught:
        stage(update(part("a", np.array([7, 8]), indices)), slots, live)
    assert caught.value.reason is Reason.APPLY_FAILED


def test_values_are_converted_to_the_type_of_the_computation():
    slots = Slots(module_of(torch.float32))
    live = stage(whole(np.random.default_rng(0)), slots, None).weights
    staged = stage(update(part("a", np.array([0x3FC0]), [5])), slots, live)
    staged.apply()
    assert staged.weights.tensors["a"].view(-1)[5] == 1.5


def test_arrays_that_may_not_be_written_are_copied(slots: Slots, live: Weights):
    asked = part("a", np.array([7]), [3])
    for array in (asked.indices, asked.values):
        assert array is not None
        array.flags.writeable = False
    staged = stage(update(asked), slots, live)
    staged.apply()
    assert bits(staged.weights)["a"][3] == 7


def random_parts(rng: np.random.Generator) -> list[TensorUpdate]:
    parts: list[TensorUpdate] = []
    for name, size in SIZES.items():
        total = int(np.prod(size))
        count = int(rng.integers(0, total + 1)) if rng.random() < 0.5 else min(3, total)
        indices = np.sort(rng.choice(total, count, replace=False))
        is_dense = bool(rng.random() < 0.2)
        values = rng.integers(0, 2**16, total if is_dense else count)
        parts.append(part(name, values, None if is_dense else indices))
    return [each for each in parts if rng.random() < 0.8]


def applied(state: dict[str, np.ndarray], parts: list[TensorUpdate]) -> dict[str, np.ndarray]:
    new = {name: array.copy() for name, array in state.items()}
    for each in parts:
        where = slice(None) if each.indices is None else each.indices
        new[each.spec.name][where] = each.values
    return new


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), keeps=st.lists(st.booleans(), min_size=1, max_size=5))
def test_any_chain_of_updates_gives_the_reference_and_kept_versions_stay(
    seed: int, keeps: list[bool]
):
    rng = np.random.default_rng(seed)
    slots = Slots(module_of())
    live = stage(whole(rng), slots, None).weights
    state, kept, states = bits(live), list[Weights](), list[dict[str, np.ndarray]]()
    for version, keep in enumerate(keeps, 1):
        if keep:
            kept.append(live)
            states.append(state)
        parts = random_parts(rng)
        asked = update(*parts, version=version, base=version - 1)
        staged = stage(asked, slots, live, kept=kept)
        staged.apply()
        if rng.random() < 0.3:
            staged.revert()
            assert_same(bits(live), state)
            staged.apply()
        live, state = staged.weights, applied(state, parts)
        assert_same(bits(live), state)
        for one, expected in zip(kept, states, strict=True):
            assert_same(bits(one), expected)
