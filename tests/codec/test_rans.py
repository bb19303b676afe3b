"""Symbols come back from any tables, the same at every level; numbers from their tokens."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.codec import dense_planes, kernels, rans
from astraflow.codec.rans import FrequencyTables, cost_bits, normalised, read_tables
from astraflow.codec.sparse_compact import MAX_TOKEN, numbers_of, pack_low_bits, tokens_of
from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Dtype


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), counts=st.lists(st.integers(0, 3000), min_size=1, max_size=6))
def test_symbols_of_several_runs_come_back_the_same_at_every_level(seed, counts):
    rng = np.random.default_rng(seed)
    symbols = [
        np.minimum(rng.geometric(p, n), 255)
        for n, p in zip(counts, rng.random(len(counts)), strict=True)
    ]
    histograms = np.stack([np.bincount(each, minlength=256) for each in symbols])
    tables = FrequencyTables.of(histograms)
    runs = rans.SymbolRuns.of(np.array(counts), np.arange(len(counts)))
    stream = np.concatenate(symbols).astype(np.uint8)
    coded = []
    for level in kernels.levels():
        with kernels.forced(level):
            states, words = rans.encode(stream, runs, tables)
            back = rans.decode(memoryview(states), memoryview(words), runs, tables)
        assert (back == stream).all()
        coded.append((states, words))

    assert all(each == coded[0] for each in coded)


def test_a_symbol_without_frequency_cannot_be_coded(level):
    tables = FrequencyTables.of(np.eye(1, 256, 3, dtype=np.int64))
    runs = rans.SymbolRuns.of(np.array([2]), np.array([0]))

    assert rans.encode(np.array([3, 4], np.uint8), runs, tables) is None


@pytest.mark.parametrize(
    ("count", "lanes"), [(0, 16), (200_000, 16), (262_144, 32), (1 << 24, 256)]
)
def test_lanes_grow_with_the_symbols(count, lanes):
    assert rans.lane_count(count) == lanes


@settings(max_examples=100)
@given(numbers=st.lists(st.integers(0, 2**64 - 2) | st.integers(0, 300), max_size=200))
def test_numbers_come_back_from_tokens_and_low_bits(numbers):
    exact = np.array(numbers, np.uint64)
    tokens, widths = tokens_of(exact)

    assert not len(tokens) or tokens.max() <= MAX_TOKEN
    assert (numbers_of(tokens, pack_low_bits(exact, widths)) == exact).all()


def test_the_token_of_300_is_what_the_documentation_says():
    tokens, widths = tokens_of(np.array([7, 8, 300], np.uint64))

    assert tokens.tolist() == [7, 8, 28]
    assert widths.tolist() == [0, 1, 6]


@settings(max_examples=25)
@given(counts=st.lists(st.integers(0, 10**6) | st.integers(0, 3), min_size=256, max_size=256))
def test_frequencies_sum_to_4096_and_leave_no_symbol_out(counts):
    histogram = np.array(counts, np.int64)
    frequencies = normalised(histogram)

    assert frequencies.sum(dtype=int) == (4096 if histogram.any() else 0)
    assert ((frequencies > 0) == (histogram > 0)).all()
    tables = FrequencyTables(frequencies=frequencies[None])
    data = tables.to_bytes()
    back, nbytes = read_tables(memoryview(data + b"more"), 1)
    assert (back.frequencies == tables.frequencies).all()
    assert nbytes == len(data)


def test_a_symbol_that_is_always_there_costs_nothing():
    histogram = np.zeros(256, np.int64)
    histogram[7] = 1000

    assert cost_bits(histogram, normalised(histogram)) == 0


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(list(Dtype)),
    count=st.integers(1, 3000),
    spread=st.sampled_from([1, 3, 40, 256]),
)
def test_planes_come_back_the_same_at_every_level(seed, dtype, count, spread):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, spread, count * dtype.itemsize).astype(np.uint8).view(dtype.bits)
    coded = []
    for level in kernels.levels():
        with kernels.forced(level):
            coded.append(dense_planes.encode(dtype, bits))
            assert (dense_planes.decode(dtype, coded[-1], count) == bits).all()

    assert all(each == coded[0] for each in coded)


def test_weights_from_a_normal_distribution_cost_a_third_less_than_raw(level):
    values = np.random.default_rng(0).normal(0, 0.02, 1 << 18).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)

    assert len(dense_planes.encode(Dtype.BF16, bits)) < 1.34 * len(bits)


@settings(max_examples=150)
@given(data=st.data())
def test_spoilt_planes_are_refused_or_are_as_many_elements(data, level):
    bits = np.random.default_rng(0).geometric(0.3, 900).astype(np.uint16)
    payload = bytearray(dense_planes.encode(Dtype.I16, bits))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    payload = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    with suppress(AstraflowError):
        assert len(dense_planes.decode(Dtype.I16, payload, 900)) == 900
