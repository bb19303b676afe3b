"""What vLLM's answers mean."""

import math
from typing import Any

import pytest

from astraflow.core.errors import AstraflowError
from astraflow.core.rollouts import FinishReason
from astraflow.engines.vllm.dialect import event_of, gauge, piece_of


def choice(**fields: Any) -> dict[str, Any]:
    return {"weight_versions": None, "logprobs": None, "token_ids": None, **fields}


def test_a_piece_has_tokens_their_logprobs_and_versions():
    content = [{"logprob": -0.5}, {"logprob": -9999.0}, {"logprob": None}]
    spans = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "7", "start": 1, "end": 3},
    ]
    piece = piece_of(
        choice(token_ids=[3, 4, 5], logprobs={"content": content}, weight_versions=spans)
    )
    assert (piece.tokens, piece.versions, piece.finish_reason) == ([3, 4, 5], [(7, 2)], None)
    assert piece.logprobs[0] == -0.5
    assert math.isnan(piece.logprobs[1])
    assert math.isnan(piece.logprobs[2])


def test_the_likeliest_tokens_are_told_in_order_without_the_one_that_was_sampled():
    said = [(9, -4.0), (3, -0.5), (7, -1.5)]
    told = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in said]
    content = [{"logprob": -4.0, "top_logprobs": told}]
    piece = piece_of(choice(token_ids=[9], logprobs={"content": content}), top_count=2)
    assert piece.likeliest == [[(3, -0.5), (7, -1.5)]]


def test_an_end_is_told_and_an_unknown_one_is_an_error():
    assert piece_of(choice(finish_reason="length")).finish_reason is FinishReason.LENGTH
    with pytest.raises(AstraflowError, match="ended by error"):
        piece_of(choice(finish_reason="error"))
    with pytest.raises(AstraflowError, match="no room"):
        event_of('data: {"error": "no room"}')


def test_a_gauge_is_summed_over_engines():
    page = 'vllm:run{engine="0"} 2\nvllm:run{engine="1"} 3\nvllm:runs 9\nvllm:other 4\n'
    assert gauge(page, "vllm:run") == 5
    assert gauge(page, "vllm:other") == 4
