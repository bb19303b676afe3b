"""OpenAI's own client, as it is."""

import json

import pytest

from astraflow.core.tasks import SamplingParams

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def client_of():
    from openai import AsyncOpenAI  # noqa: PLC0415 - takes a second of CPU

    def make(stage):
        return AsyncOpenAI(
            base_url=stage.entrance.base_url, api_key=stage.entrance.key, max_retries=0
        )

    return make


async def test_a_chat_of_two_turns_is_one_trajectory(stage, client_of):
    async with stage(lambda text: "one" if text.count("[u]") == 1 else "two") as at:
        async with client_of(at) as client:
            first = await client.chat.completions.create(model="gpt-4o", messages=[user("a")])
            said = first.choices[0].message
            second = await client.chat.completions.create(
                model="gpt-4o", messages=[user("a"), said, user("b")], logprobs=True
            )
        (trajectory,) = at.episode.trajectories()
    assert (said.content, second.choices[0].message.content) == ("one", "two")
    assert first.usage.completion_tokens == 3
    assert [each.token for each in second.choices[0].logprobs.content] == ["t", "w", "o"]
    tokenizer = at.episode.port().tokenizer
    assert tokenizer.decode(trajectory.tokens) == "[u]a;[a]one;[u]b;[a]two"
    assert tokenizer.decode(trajectory.tokens[trajectory.sampled_mask]) == "onetwo"


async def test_a_stream_shows_what_a_whole_answer_has(stage, client_of):
    async with stage(lambda text: "some words.") as at, client_of(at) as client:
        stream = await client.chat.completions.create(
            model="solver",
            messages=[user("a")],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "some words."
    assert len([text for text in texts if text]) > 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == len("some words.")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_are_called_and_answered(stage, client_of, is_streamed):
    def answer(text):
        return "It is 3." if "[t]3" in text else f"Wait.{CALL}"

    async with (
        stage(answer, sampling=SamplingParams(max_new_tokens=256)) as at,
        client_of(at) as client,
    ):
        talk = [user("1+2?")]
        first = await create(client, talk, is_streamed)
        (call,) = first["tool_calls"]
        assert (first["content"], call["function"]["name"]) == ("Wait.", "add")
        talk += [
            {"role": "assistant", **first},
            {"role": "tool", "tool_call_id": call["id"], "content": "3"},
        ]
        assert (await create(client, talk, is_streamed))["content"] == "It is 3."
        assert len(at.episode.trajectories()) == 1


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_tool_that_is_forced_is_called(stage, client_of, choice):
    def answer(text):
        return "It is 3." if "[t]3" in text else '{"a": 1}}\n</tool_call>'

    asked = {"model": "m", "tools": TOOLS}
    async with (
        stage(answer, sampling=SamplingParams(max_new_tokens=256)) as at,
        client_of(at) as client,
    ):
        talk = [user("1+2?")]
        first = await client.chat.completions.create(messages=talk, tool_choice=choice, **asked)
        said = first.choices[0].message
        (call,) = said.tool_calls
        assert (said.content, call.function.name) == (None, "add")
        assert call.function.arguments == '{"a": 1}'
        talk += [said, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        await client.chat.completions.create(messages=talk, **asked)
        (trajectory,) = at.episode.trajectories()
    tokenizer = at.episode.port().tokenizer
    sampled = tokenizer.decode(trajectory.tokens[trajectory.sampled_mask])
    assert sampled == '{"a": 1}}\n</tool_call>It is 3.'


async def test_a_forced_call_that_is_no_json_is_shown_as_it_was_said(stage, client_of):
    async with stage(lambda text: "{'a': 1}") as at, client_of(at) as client:
        stream = await client.chat.completions.create(
            model="m", messages=[user("a")], tools=TOOLS, tool_choice="required", stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function.arguments == "{'a': 1}"
    assert not any(delta.content for delta in deltas)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_who_wants_one_call_at_a_time_gets_one(stage, client_of, is_streamed):
    def answer(text):
        return "It is 3." if "[t]3" in text else f"Wait.{CALL}\n{CALL}"

    sampling = SamplingParams(max_new_tokens=256)
    async with stage(answer, sampling=sampling) as at, client_of(at) as client:
        talk = [user("1+2?")]
        first = await create(client, talk, is_streamed, parallel_tool_calls=False)
        (call,) = first["tool_calls"]
        talk += [
            {"role": "assistant", **first},
            {"role": "tool", "tool_call_id": call["id"], "content": "3"},
        ]
        said = await create(client, talk, is_streamed, parallel_tool_calls=False)
        assert said == {"content": "It is 3."}
        assert len(at.episode.trajectories()) == 1
        asked = {"model": "m", "input": "1+2?", "parallel_tool_calls": False}
        tool = {"type": "function", "strict": None, **TOOLS[0]["function"]}
        told = await client.responses.create(**asked, tools=[tool])
    assert [each.type for each in told.output] == ["message", "function_call"]
    assert told.parallel_tool_calls is False


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_is_broken_is_shown_as_text_and_the_chat_goes_on(
    stage, client_of, is_streamed
):
    broken = 'Wait. <tool_call>{"name": "add", "arguments": {"a": '

    def answer(text):
        return "Sorry." if "again" in text else broken

    sampling = SamplingParams(max_new_tokens=256)
    async with stage(answer, sampling=sampling) as at, client_of(at) as client:
        talk = [user("1+2?")]
        first = await create(client, talk, is_streamed)
        assert first == {"content": broken}
        talk += [{"role": "assistant", **first}, user("again")]
        assert await create(client, talk, is_streamed) == {"content": "Sorry."}
        assert len(at.episode.trajectories()) == 1


async def create(client, messages, is_streamed, **more):
    asked = {"model": "m", "messages": messages, "tools": TOOLS, **more}
    if not is_streamed:
        answer = await client.chat.completions.create(**asked)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        return {key: message[key] for key in ("content", "tool_calls") if key in message}
    made = {"content": "", "tool_calls": []}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        made["content"] += delta.content or ""
        made["tool_calls"] += [
            each.model_dump(exclude={"index"}) for each in delta.tool_calls or ()
        ]
    return made if made["tool_calls"] else {"content": made["content"]}


async def test_several_choices_are_branches_that_differ(stage, client_of):
    async with stage() as at, client_of(at) as client:
        answer = await client.chat.completions.create(
            model="m", messages=[user("a")], n=3, max_tokens=8, seed=4
        )
        texts = {choice.message.content for choice in answer.choices}
        assert len(texts) == len(at.episode.trajectories()) == 3
        assert {choice.finish_reason for choice in answer.choices} == {"length"}


async def test_what_a_stop_string_ends_is_not_shown(stage, client_of):
    async with stage(lambda text: "yes END") as at, client_of(at) as client:
        answer = await client.chat.completions.create(model="m", messages=[user("a")], stop=["END"])
        stream = await client.chat.completions.create(
            model="m", messages=[user("b")], stop="END", stream=True
        )
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert answer.choices[0].message.content == "yes "
    assert "".join(streamed) == "yes "


async def test_texts_go_on_from_what_was_sampled(stage, client_of):
    async with stage(lambda text: "!" * (1 + text.count("?"))) as at, client_of(at) as client:
        first = await client.completions.create(model="m", prompt="a?", logprobs=1)
        text = "a?" + first.choices[0].text + "b?"
        stream = await client.completions.create(model="m", prompt=text, stream=True)
        second = [chunk.choices[0].text async for chunk in stream]
        assert first.choices[0].text == "!!"
        assert first.choices[0].logprobs.tokens == ["!", "!"]
        assert first.choices[0].logprobs.text_offset == [0, 1]
        assert "".join(second) == "!!!"
        assert len(at.episode.trajectories()) == 1


async def test_models_are_the_policies(stage, client_of):
    async with stage(policies=("solver", "judge")) as at, client_of(at) as client:
        assert [model.id async for model in client.models.list()] == ["solver", "judge"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_are_chats_written_another_way(stage, client_of, is_streamed):
    def answer(text):
        return "It is 3." if "[t]3" in text else f"Wait.{CALL}"

    tool = {"type": "function", "strict": None, **TOOLS[0]["function"]}
    sampling = SamplingParams(max_new_tokens=256)
    async with stage(answer, sampling=sampling) as at, client_of(at) as client:
        talk = [user("1+2?")]
        first = await respond(client, talk, [tool], is_streamed)
        message, call = first.output
        assert (message.content[0].text, call.name) == ("Wait.", "add")
        talk += [each.model_dump(exclude_none=True) for each in first.output]
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        second = await respond(client, talk, [tool], is_streamed)
        assert second.output_text == "It is 3."
        assert second.usage.output_tokens == len("It is 3.")
        assert len(at.episode.trajectories()) == 1


async def respond(client, talk, tools, is_streamed):
    if not is_streamed:
        return await client.responses.create(model="m", input=talk, tools=tools)
    async with client.responses.stream(model="m", input=talk, tools=tools) as stream:
        async for _ in stream:
            pass
        return await stream.get_final_response()


async def test_responses_tell_log_probabilities(stage, client_of):
    asked = {"model": "m", "input": "a", "top_logprobs": 0}
    async with stage(lambda text: "ok") as at, client_of(at) as client:
        told = await client.responses.create(**asked, include=["message.output_text.logprobs"])
        silent = await client.responses.create(**asked)
    (message,) = told.output
    assert [each.token for each in message.content[0].logprobs] == ["o", "k"]
    assert silent.output[0].content[0].logprobs == []


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_of_a_namespace_are_called_by_it(stage, client_of, is_streamed):
    said = '<tool_call>{"name": "sums.add", "arguments": {"a": 1}}</tool_call>'

    def answer(text):
        return "It is 3." if "[t]3" in text else said

    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [tool]}
    sampling = SamplingParams(max_new_tokens=256)
    async with stage(answer, sampling=sampling) as at, client_of(at) as client:
        talk = [user("1+2?")]
        first = await respond(client, talk, [space], is_streamed)
        call = first.output[-1].to_dict()
        assert (call["namespace"], call["name"], call["arguments"]) == ("sums", "add", '{"a": 1}')
        talk += [each.to_dict() for each in first.output]
        talk.append({"type": "function_call_output", "call_id": call["call_id"], "output": "3"})
        assert (await respond(client, talk, [space], is_streamed)).output_text == "It is 3."
        assert len(at.episode.trajectories()) == 1


async def test_a_stream_of_responses_has_the_events_of_a_call(stage, client_of):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    sampling = SamplingParams(max_new_tokens=256)
    async with stage(lambda text: CALL, sampling=sampling) as at, client_of(at) as client:
        asked = {"model": "m", "input": "1+2?", "tools": [tool], "stream": True}
        events = [event async for event in await client.responses.create(**asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    opened, begun, added, delta, done, item, whole = events
    assert [opened.type, begun.type] == ["response.created", "response.in_progress"]
    assert (added.item.arguments, item.item.status) == ("", "completed")
    assert delta.delta == done.arguments == item.item.arguments == '{"a": 1, "b": 2}'
    assert whole.response.output == [item.item]


async def test_a_stream_of_responses_ends_with_what_went_wrong(stage, client_of):
    from openai import APIError  # noqa: PLC0415

    async with stage() as at, client_of(at) as client, at.client() as plain:
        at.engine.version = None
        asked = {"model": "m", "input": "a", "stream": True}
        stream = await client.responses.create(**asked)
        with pytest.raises(APIError, match="no version"):
            async for _ in stream:
                pass
        answer = await plain.post("v1/responses", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:5] == "data:"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[-1]["type"], events[-1]["error"]["code"]) == ("error", "no_weights_yet")
