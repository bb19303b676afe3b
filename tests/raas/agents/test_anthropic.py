"""Anthropic's messages: the same talk, written another way."""

import json

import pytest

from astraflow.core.tasks import SamplingParams
from astraflow.testing import CharTokenizer

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL = {"name": "add", "description": "sum", "input_schema": {"type": "object"}}


def answer(text):
    return "It is 3." if "[t]3" in text else f"Wait.{CALL}"


async def test_messages_call_tools_and_go_on(stage):
    sampling = SamplingParams(max_new_tokens=256)
    async with stage(answer, sampling=sampling) as at, at.client() as client:
        asked = {
            "model": "claude",
            "max_tokens": 99,
            "system": "Be brief.",
            "tools": [TOOL],
            "messages": [{"role": "user", "content": "1+2?"}],
        }
        first = (await client.post("v1/messages", json=asked)).json()
        text, call = first["content"]
        assert (first["stop_reason"], text["text"], call["input"]) == (
            "tool_use",
            "Wait.",
            {"a": 1},
        )
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "3"}
        asked["messages"] += [
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        second = (await client.post("v1/messages", json=asked)).json()
        assert second["content"] == [{"type": "text", "text": "It is 3."}]
        assert len(at.episode.trajectories()) == 1


async def test_arguments_whose_numbers_javascript_writes_another_way_are_known_again(stage):
    call = '<tool_call>{"name": "add", "arguments": {"a": 1.0, "b": 12345678901234567890}}'

    def answer(told):
        return "3" if "[t]3" in told else f"{call}</tool_call>"

    async with stage(answer, sampling=SamplingParams(max_new_tokens=256)) as at:
        async with at.client() as client:
            user = {"role": "user", "content": "1+2?"}
            asked = {"model": "m", "max_tokens": 256, "tools": [TOOL], "messages": [user]}
            (said,) = (await client.post("v1/messages", json=asked)).json()["content"]
            assert said["input"]["a"] == 1
            said["input"] = {"a": 1, "b": 12345678901234567000}
            result = {"type": "tool_result", "tool_use_id": said["id"], "content": "3"}
            asked["messages"] += [
                {"role": "assistant", "content": [said]},
                {"role": "user", "content": [result]},
            ]
            await client.post("v1/messages", json=asked)
        assert len(at.episode.trajectories()) == 1


async def test_streams_have_the_events_in_their_order(stage):
    sampling = SamplingParams(max_new_tokens=256)
    async with stage(answer, sampling=sampling) as at, at.client() as client:
        asked = {"model": "m", "max_tokens": 99, "tools": [TOOL], "stream": True}
        asked["messages"] = [{"role": "user", "content": "1+2?"}]
        answered = await client.post("v1/messages", json=asked)
    events = [part.partition("data: ") for part in answered.text.split("\n\n") if part]
    names = [name.removeprefix("event: ").strip() for name, _, _ in events]
    data = [json.loads(body) for _, _, body in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert [each["type"] for each in data] == names
    deltas = [each["delta"] for each in data if each["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == "Wait."
    assert json.loads(deltas[-1]["partial_json"]) == {"a": 1}


@pytest.mark.parametrize("given", [["\n\nHuman:", "END"], ["never"], None])
async def test_a_stop_sequence_is_named_where_one_ended_the_message(stage, given):
    async with stage(lambda text: "yes END") as at, at.client() as client:
        asked = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "a"}]}
        asked |= {"stop_sequences": given} if given else {}
        whole = (await client.post("v1/messages", json=asked)).json()
        streamed = await client.post("v1/messages", json={**asked, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line[:5] == "data:"]
    ending = events[-2]
    ended = given is not None and "END" in given
    wanted = ("stop_sequence", "END") if ended else ("end_turn", None)
    assert (whole["stop_reason"], whole["stop_sequence"]) == wanted
    assert tuple(ending["delta"][name] for name in ("stop_reason", "stop_sequence")) == wanted
    assert whole["content"][0]["text"] == ("yes " if ended else "yes END")


async def test_an_answer_goes_on_from_what_the_agent_began(stage):
    def answer(told):
        return "1}" if told.endswith('[a]{"a": ') else "more"

    async with stage(answer) as at, at.client() as client:
        begun = {"role": "assistant", "content": [{"type": "text", "text": '{"a": '}]}
        asked = {"model": "m", "max_tokens": 99}
        asked["messages"] = [{"role": "user", "content": "x"}, begun]
        first = (await client.post("v1/messages", json=asked)).json()
        counted = (await client.post("v1/messages/count_tokens", json=asked)).json()
        assert first["content"] == [{"type": "text", "text": "1}"}]
        assert counted["input_tokens"] == first["usage"]["input_tokens"]
        asked["messages"][1] = {"role": "assistant", "content": '{"a": 1}'}
        asked["messages"].append({"role": "user", "content": "again"})
        second = (await client.post("v1/messages", json=asked)).json()
        assert second["content"] == [{"type": "text", "text": "more"}]
        alone = await client.post("v1/messages", json={**asked, "messages": [begun]})
        (trajectory,) = at.episode.trajectories()
    assert alone.status_code == 400
    assert CharTokenizer().decode(trajectory.tokens[trajectory.sampled_mask]) == "1}more"


async def test_errors_are_of_that_kind(stage):
    async with stage(answer) as at, at.client() as client:
        refused = await client.post("v1/messages", json={"model": "m", "messages": []})
        assert refused.status_code == 400
        assert refused.json()["error"]["type"] == "invalid_request_error"
        search = {"type": "web_search_20250305", "name": "web_search"}
        hi = [{"role": "user", "content": "hi"}]
        refused = await client.post("v1/messages", json={"messages": hi, "tools": [TOOL, search]})
        assert "tools[1] is not served here" in refused.json()["error"]["message"]
        for body in ("[]", '{"messages": ["hi"]}', '{"messages": [], "tools": [3]}'):
            assert (await client.post("v1/messages", content=body)).status_code == 400
        for body in ("{}", '{"input": null}'):
            refused = await client.post("v1/responses", content=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
        for body in ("[]", '{"input": [3]}', '{"input": {"a": 1}}', '{"input": "a", "tools": [3]}'):
            assert (await client.post("v1/responses", content=body)).status_code == 400
