"""What is asked of SGLang, and what its answers mean."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.core.tasks import Grammar, SamplingParams
from astraflow.engines.served.dialect import ServerRequest
from astraflow.engines.sglang.dialect import (
    SglangDialect,
    after_least,
    generate_body,
    named_after,
    piece_of,
    until_least,
)

REQUEST = ServerRequest(
    request_id="r1",
    prompt=(3, 4),
    sampling=SamplingParams(max_new_tokens=5),
    stop_ids=(2,),
    never_sampled=(0, 1),
    cache_salt="s3",
)


def answer(
    ids: list[int], live: str, spans: Sequence[tuple[str, int, int]] = (), finish: str = ""
) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-0.5 * each, each, None] for each in ids],
        "weight_version": live,
        "finish_reason": {"type": finish, "message": "why"} if finish else None,
    }
    if spans:
        said = [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]
        meta["weight_versions"] = said
    return {"output_ids": ids, "meta_info": meta}


def test_the_only_tensor_is_named_after_the_file():
    ((name, tensor),) = pickle.loads(named_after("/dev/shm/größe/7.update"))
    assert name == "/dev/shm/größe/7.update"
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == (1,)


def test_a_request_says_what_ends_it_and_what_is_never_sampled():
    body = generate_body(REQUEST)
    assert (body["input_ids"], body["rid"], body["extra_key"]) == ([3, 4], "r1", "s3")
    assert body["sampling_params"]["stop_token_ids"] == [2]
    assert not body["sampling_params"]["ignore_eos"]
    assert body["sampling_params"]["logit_bias"].keys() == {"0", "1"}


def test_the_likeliest_tokens_are_asked_for_and_told():
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, top_logprobs=2))
    assert generate_body(request)["top_logprobs_num"] == 2
    said = answer([5], "1", [("1", 0, 1)], "stop")
    said["meta_info"]["output_top_logprobs"] = [[[-0.1, 4, None], [-2.5, 5, None]]]
    assert piece_of(said).likeliest == [[(4, -0.1), (5, -2.5)]]


@pytest.mark.parametrize(
    "wrong", [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"grammar": Grammar(answer="{}")}]
)
def test_knobs_that_would_be_honoured_in_another_way_are_refused(wrong: dict[str, Any]):
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, **wrong))
    with pytest.raises(AstraflowError) as caught:
        generate_body(request)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata["field"] == f"sampling.{next(iter(wrong))}"


def test_nothing_ends_a_completion_before_its_least_length():
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, min_new_tokens=2))
    first = generate_body(until_least(request))["sampling_params"]
    assert (first["max_new_tokens"], first["ignore_eos"]) == (2, True)
    assert first["logit_bias"].keys() == {"0", "1", "2"}
    rest = generate_body(after_least(request, [7, 8]))
    assert rest["input_ids"] == [3, 4, 7, 8]
    assert rest["sampling_params"]["max_new_tokens"] == 3
    assert rest["sampling_params"]["stop_token_ids"] == [2]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
async def test_penalties_that_would_begin_anew_in_the_middle_are_refused(name: str):
    sampling = replace(REQUEST.sampling, min_new_tokens=2, **{name: 1.5})
    async with httpx.AsyncClient() as http:
        pieces = SglangDialect(Path()).generate(http, replace(REQUEST, sampling=sampling))
        with pytest.raises(AstraflowError, match="begin anew") as caught:
            await anext(pieces)
    assert caught.value.metadata["field"] == f"sampling.{name}"
    all_of_it = replace(sampling, min_new_tokens=5)
    until_least(replace(REQUEST, sampling=all_of_it))


def test_the_last_answer_of_a_stream_tells_all_versions():
    first = piece_of(answer([5, 6], "4"))
    second = piece_of(answer([7, 8], "5"))
    last = piece_of(answer([3], "5", [("4", 0, 3), ("5", 3, 5)], "length"))
    assert (first.tokens, first.versions, first.finish_reason) == ([5, 6], [], None)
    assert (second.tokens, second.versions) == ([7, 8], [])
    assert (last.tokens, last.versions) == ([3], [(4, 3), (5, 2)])
    assert (last.logprobs, last.finish_reason) == ([-1.5], FinishReason.LENGTH)


def test_what_was_withdrawn_is_told_as_that():
    last = piece_of(answer([5], "1", [("1", 0, 1)], "abort"))
    assert (last.finish_reason, last.versions) == (FinishReason.ABORT, [(1, 1)])


def test_weights_of_no_version_are_an_error():
    with pytest.raises(AstraflowError, match="default") as caught:
        piece_of(answer([5], "default", [("default", 0, 1)], "stop"))
    assert caught.value.reason is Reason.ENGINE_FAILED
