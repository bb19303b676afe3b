"""The distribution drawn from, against the logits processors of transformers."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded.rows import DecodeRows, Request
from astraflow.engines.embedded.sampler import Sampler, stream_of

VOCABULARY = 24


def table_of(*knobs: SamplingParams, prompt: list[int] | None = None) -> DecodeRows:
    rows = DecodeRows(limit=max(16, len(knobs)), column_limit=64)
    rows.add(
        [
            Request(
                prompt=np.array(prompt or [1], np.int32),
                sampling=sampling,
                stream=stream_of(sampling.seed or 0),
                budget=8,
                version=None,
                reply=asyncio.get_running_loop().create_future(),
            )
            for sampling in knobs
        ]
    )
    return rows


def sampler(**fields: Any) -> Sampler:
    return Sampler(
        vocab_size=VOCABULARY,
        eos_ids=fields.get("eos_ids", ()),
        never_sampled_ids=fields.get("never_sampled_ids", ()),
        device=torch.device("cpu"),
    )


def logits_of(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, knobs: list[SamplingParams], **fields: Any):
    prompt = fields.pop("prompt", None)
    rows = slice(0, len(knobs))
    table = table_of(*knobs, prompt=prompt)
    return sampler(**fields).draw(logits.expand(len(knobs), -1), table, rows)


Expected = Callable[[torch.Tensor], torch.Tensor]
CASES: list[tuple[dict[str, Any], Expected]] = [
    ({}, lambda x: x),
    ({"temperature": 0.5}, lambda x: TemperatureLogitsWarper(0.5)(None, x)),
    ({"top_k": 5}, lambda x: TopKLogitsWarper(5)(None, x)),
    ({"top_p": 0.7}, lambda x: TopPLogitsWarper(0.7)(None, x)),
    ({"min_p": 0.2}, lambda x: MinPLogitsWarper(0.2)(None, x)),
    (
        {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
        lambda x: MinPLogitsWarper(0.1)(
            None,
            TopPLogitsWarper(0.8)(
                None, TopKLogitsWarper(6)(None, TemperatureLogitsWarper(1.5)(None, x))
            ),
        ),
    ),
    (
        {"repetition_penalty": 1.7},
        lambda x: RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 4, 4]]), x),
    ),
]


@pytest.mark.parametrize(("knobs", "expected"), CASES)
async def test_logprobs_are_those_of_the_distribution_drawn_from(
    knobs: dict[str, Any], expected: Expected
):
    logits = logits_of()
    asked = [SamplingParams(seed=seed, **knobs) for seed in range(2000)]
    tokens, logprobs = draw(logits, asked, prompt=[1, 4, 4])
    wanted = torch.log_softmax(expected(logits[None].clone())[0], dim=-1).numpy()
    np.testing.assert_allclose(logprobs, wanted[tokens], atol=2e-6)
    shares = np.bincount(tokens, minlength=VOCABULARY) / len(tokens)
    np.testing.assert_allclose(shares, np.exp(wanted), atol=0.04)


async def test_frequency_and_presence_lower_what_was_sampled_and_not_the_prompt():
    knobs = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    table = table_of(knobs, prompt=[1, 2])
    for token in (7, 7, 9):
        table.append(slice(0, 1), np.array([token]), np.zeros(1, np.float32))
    logits = torch.zeros(1, VOCABULARY)
    shaped = sampler()._shaped(logits, table, slice(0, 1))[0]
    assert (shaped[7], shaped[9], shaped[1], shaped[3]) == (-2.0, -1.5, 0.0, 0.0)


async def test_a_row_without_knobs_has_the_same_bits_beside_one_that_has_them():
    plain = SamplingParams(seed=3)
    busy = SamplingParams(seed=4, top_k=3, top_p=0.5, repetition_penalty=2.0, temperature=0.3)
    alone = draw(logits_of(), [plain])
    beside = draw(logits_of(), [plain, busy, SamplingParams(temperature=0)])
    assert (alone[0][0], alone[1][0]) == (beside[0][0], beside[1][0])


async def test_banned_ids_never_come_and_the_rest_adds_up():
    asked = [SamplingParams(seed=seed, temperature=100.0) for seed in range(500)]
    tokens, logprobs = draw(torch.zeros(VOCABULARY), asked, never_sampled_ids=(0, 23))
    assert set(tokens.tolist()) <= set(range(1, 23))
    np.testing.assert_allclose(logprobs, np.log(1 / 22), rtol=1e-5)


async def test_end_tokens_wait_for_the_least_length():
    certain = torch.full((VOCABULARY,), -50.0)
    certain[2] = 50.0
    held, free = SamplingParams(min_new_tokens=2), SamplingParams()
    tokens, _ = draw(certain, [held, free], eos_ids=(2,))
    assert tokens[0] != 2
    assert tokens[1] == 2


async def test_logits_that_are_not_finite_show_in_the_logprob():
    spoilt = torch.full((VOCABULARY,), torch.nan)
    _, logprobs = draw(spoilt, [SamplingParams(), SamplingParams(temperature=0)])
    assert np.isnan(logprobs).all()
