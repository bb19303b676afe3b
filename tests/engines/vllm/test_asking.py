"""What vLLM is asked for."""

import json
from dataclasses import replace
from typing import Any

import pytest

from astraflow.core.tasks import Grammar, SamplingParams
from astraflow.engines.served.dialect import ServerRequest
from astraflow.engines.vllm.dialect import sampling_body

REQUEST = ServerRequest(request_id="r", prompt=(3,), sampling=SamplingParams(max_new_tokens=5))


def asked(**knobs: Any) -> dict[str, Any]:
    return sampling_body(replace(REQUEST, sampling=replace(REQUEST.sampling, **knobs)))


@pytest.mark.parametrize(("asked_for", "told"), [(0, 0), (1, 2), (20, 21)])
def test_the_token_that_was_sampled_counts_among_the_likeliest(asked_for: int, told: int):
    assert asked(top_logprobs=asked_for)["logprobs"] == told


def test_an_answer_is_asked_for_by_its_schema():
    assert asked()["structured_outputs"] is None
    schema = '{"type": "object"}'
    assert asked(grammar=Grammar(answer=schema))["structured_outputs"] == {"json": schema}


def test_a_call_is_asked_for_by_its_tags_and_either_by_both():
    call, answer = {"const": 1}, {"const": 2}
    tag = {
        "type": "tag",
        "begin": "<tool_call>\n",
        "content": {"type": "json_schema", "json_schema": call},
        "end": "\n</tool_call>",
    }
    alone = asked(grammar=Grammar(call=json.dumps(call)))["structured_outputs"]
    assert json.loads(alone["structural_tag"]) == {"type": "structural_tag", "format": tag}
    both = Grammar(answer=json.dumps(answer), call=json.dumps(call))
    said = json.loads(asked(grammar=both)["structured_outputs"]["structural_tag"])["format"]
    assert said["type"] == "or"
    assert said["elements"] == [{"type": "json_schema", "json_schema": answer}, tag]
