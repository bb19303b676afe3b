"""Anthropic's own client, as it is."""

import pytest

from astraflow.core.tasks import SamplingParams

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TOOLS = [{"name": "add", "description": "sum", "input_schema": {"type": "object"}}]
LONG = SamplingParams(max_new_tokens=256)


def user(content):
    return {"role": "user", "content": content}


def result_of(call):
    return user([{"type": "tool_result", "tool_use_id": call.id, "content": "3"}])


def answer(text):
    return "It is 3." if "[t]3" in text else f"Wait.{CALL}"


@pytest.fixture
def client_of():
    from anthropic import AsyncAnthropic  # noqa: PLC0415 - takes a second of CPU

    def make(stage):
        entrance = stage.entrance
        return AsyncAnthropic(base_url=entrance.session_url, api_key=entrance.key, max_retries=0)

    return make


async def test_a_text_comes_whole_and_as_a_stream(stage, client_of):
    async with stage(lambda text: "some words.") as at, client_of(at) as client:
        asked = {"model": "claude", "max_tokens": 32, "messages": [user("hi")]}
        whole = await client.messages.create(system="Be brief.", **asked)
        async with client.messages.stream(**asked) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
    assert [block.text for block in whole.content] == ["some words."]
    assert ("".join(texts), streamed.content[0].text) == ("some words.", "some words.")
    assert (whole.stop_reason, streamed.stop_reason) == ("end_turn", "end_turn")
    assert streamed.usage.output_tokens == len("some words.")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tools_are_called_and_answered(stage, client_of, is_streamed):
    async def create(messages):
        asked = {"model": "claude", "max_tokens": 99, "tools": TOOLS, "messages": messages}
        if not is_streamed:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    async with stage(answer, sampling=LONG) as at, client_of(at) as client:
        talk = [user("1+2?")]
        first = await create(talk)
        text, call = first.content
        assert (text.text, call.name, call.input) == ("Wait.", "add", {"a": 1, "b": 2})
        assert first.stop_reason == "tool_use"
        talk += [{"role": "assistant", "content": first.content}, result_of(call)]
        second = await create(talk)
        assert second.content[-1].text == "It is 3."
        assert len(at.episode.trajectories()) == 1


async def test_who_wants_one_tool_at_a_time_gets_one(stage, client_of):
    async with stage(lambda text: CALL + CALL, sampling=LONG) as at, client_of(at) as client:
        asked = {"model": "claude", "max_tokens": 200, "messages": [user("1+2?")], "tools": TOOLS}
        for choice in ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "auto"}):
            said = await client.messages.create(**asked, tool_choice=choice)
            assert len(said.content) == 1 + ("disable_parallel_tool_use" not in choice)


async def test_a_tool_can_be_forced(stage, client_of):
    async with stage(lambda text: '{"a": 1}}', sampling=LONG) as at, client_of(at) as client:
        forced = await client.messages.create(
            model="claude",
            max_tokens=99,
            messages=[user("1+2?")],
            tools=TOOLS,
            tool_choice={"type": "any"},
        )
    (call,) = forced.content
    assert (call.name, call.input) == ("add", {"a": 1})


@pytest.mark.parametrize(
    "said", ['{"a": NaN}', "'a'", '"a"', "[1]", '{"a": 1e999}', "[" * 2000, r'{"a": "\ud800"}']
)
async def test_arguments_that_are_no_object_are_shown_and_come_back(stage, client_of, said):
    def answer(text):
        return "It is 3." if "[t]3" in text else f"{said}}}</tool_call>"

    forced = {"type": "tool", "name": "add"}
    async with stage(answer, sampling=LONG) as at, client_of(at) as client:
        asked = {"model": "claude", "max_tokens": 99, "tools": TOOLS}
        talk = [user("1+2?")]
        first = await client.messages.create(messages=talk, tool_choice=forced, **asked)
        (call,) = first.content
        assert isinstance(call.input, dict)
        talk += [{"role": "assistant", "content": first.content}, result_of(call)]
        await client.messages.create(messages=talk, **asked)
        assert len(at.episode.trajectories()) == 1


async def test_errors_are_of_its_own_kinds(stage, client_of):
    from anthropic import BadRequestError, NotFoundError  # noqa: PLC0415

    asked = {"model": "claude", "max_tokens": 9}
    async with stage(answer, max_context=8) as at, client_of(at) as client:
        with pytest.raises(BadRequestError, match="context"):
            await client.messages.create(messages=[user("a long question")], **asked)
        at.entrance = type(at.entrance)(
            base_url="", session_url=f"{at.entrance.session_url}x", key=at.entrance.key
        )
        async with client_of(at) as lost:
            with pytest.raises(NotFoundError):
                await lost.messages.create(messages=[user("hi")], **asked)


async def test_tokens_are_counted_as_they_would_be_read(stage, client_of):
    asked = {"model": "claude", "messages": [user("1+2?")], "tools": TOOLS}
    async with stage(answer, sampling=LONG) as at, client_of(at) as client:
        counted = await client.messages.count_tokens(**asked)
        assert not at.episode.has_sampled
        said = await client.messages.create(**asked, max_tokens=99)
        assert counted.input_tokens == said.usage.input_tokens
