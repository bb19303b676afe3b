"""What has to be JSON is JSON, whatever the model; only its own draws are trained on."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict

import agent_fuzz
from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Outcome
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.tokenizer import load_tokenizer
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.protocol import PolicyFault
from astraflow.workflows.runner import LoadedWorkflow, run_episode
from made_up import made_up_task

pytestmark = pytest.mark.slow


class Answer(BaseModel):
    """Bounded, so that a model with random weights comes to its end."""

    model_config = ConfigDict(extra="forbid", strict=True)

    colour: Literal["red", "green"]
    is_sure: bool
    parts: tuple[Literal[1, 2], Literal["x"]] | None


ASKED = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"$ref": "#/$defs/Colour"},
        "is_sure": {"type": "boolean"},
        "parts": {
            "anyOf": [
                {"type": "null"},
                {"type": "array", "prefixItems": [{"enum": [1, 2]}, {"const": "x"}],
                 "items": False, "minItems": 2},
            ]
        },
    },
    "required": ["colour", "is_sure", "parts"],
    "additionalProperties": False,
    "$defs": {"Colour": {"enum": ["red", "green"]}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ONE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
       "additionalProperties": False}  # fmt: skip


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("look", SCHEMA), tool("count", ONE)]


@pytest.fixture
def folder(tmp_path):
    agent_fuzz.write_model(tmp_path)
    return tmp_path


@pytest.fixture
def stage(folder):
    @asynccontextmanager
    async def make(*, is_trained=False):
        from openai import AsyncOpenAI  # noqa: PLC0415 - takes a second of CPU

        settings = EngineSettings(kind="embedded", max_batch=16, max_context=2048)
        engine = EmbeddedEngine.from_directory(folder, settings, "p")
        await engine.load_directory(0)
        endpoint = AgentEndpoint()
        sampling = SamplingParams(max_new_tokens=900, seed=3)
        task = made_up_task(sampling={"p": sampling})
        port = PolicyPort(
            policy_id="p",
            engine=engine,
            tokenizer=load_tokenizer(folder),
            sampling=sampling,
            template=ChatTemplate(
                "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            ),
            is_trained=is_trained,
        )
        episode = Episode(task=task, sample_index=0, policies={"p": port})
        session = AgentSession(episode)
        try:
            async with (
                endpoint.open(session) as entrance,
                AsyncOpenAI(base_url=entrance.base_url, api_key=entrance.key, max_retries=0) as it,
            ):
                yield it.chat.completions, episode
        finally:
            await endpoint.close()
            await engine.close()

    return make


async def said(chats, *, is_streamed, **asked):
    """Return the text, the calls and the finish reason of each choice."""
    if not is_streamed:
        answer = await chats.create(**ASKED, **asked)
        return [
            (each.message.content or "", each.message.tool_calls or [], each.finish_reason)
            for each in answer.choices
        ]
    made = {}
    async for chunk in await chats.create(**ASKED, **asked, stream=True):
        for choice in chunk.choices:
            text, calls, finish = made.get(choice.index, ("", [], None))
            made[choice.index] = (
                text + (choice.delta.content or ""),
                [*calls, *(choice.delta.tool_calls or [])],
                choice.finish_reason or finish,
            )
    return list(made.values())


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_parses_under_its_schema(stage, is_streamed):
    async with stage() as (chats, _):
        for seed in range(3):
            for text, calls, finish in await said(
                chats, is_streamed=is_streamed, response_format=FORMAT, n=8, seed=seed
            ):
                assert (calls, finish) == ([], "stop")
                Answer.model_validate_json(text)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_of_several_tools_is_called(stage, is_streamed):
    async with stage() as (chats, _):
        asked = {"tools": TOOLS, "tool_choice": "required", "n": 16}
        made = await said(chats, is_streamed=is_streamed, **asked)
    names = set()
    for text, (call,), finish in made:
        assert (text, finish) == ("", "tool_calls")
        names.add(call.function.name)
        if call.function.name == "look":
            Answer.model_validate_json(call.function.arguments)
        else:
            assert json.loads(call.function.arguments)["n"] in (1, 2)
    assert names == {"look", "count"}


async def test_a_strict_tool_gets_what_its_schema_says(stage):
    tools = [tool("look", SCHEMA, strict=True), TOOLS[1]]
    choice = {"type": "function", "function": {"name": "look"}}
    async with stage() as (chats, _):
        for _, (call,), _ in await said(
            chats, is_streamed=False, tools=tools, tool_choice=choice, n=8
        ):
            assert call.function.name == "look"
            Answer.model_validate_json(call.function.arguments)


async def test_who_may_call_tools_calls_one_or_answers_as_was_asked(stage):
    async with stage() as (chats, _):
        made = await said(
            chats, is_streamed=True, tools=TOOLS, response_format=FORMAT, n=16, seed=1
        )
    for text, calls, _ in made:
        assert calls or Answer.model_validate_json(text)
    assert 0 < sum(not calls for _, calls, _ in made) < len(made)


async def test_json_of_any_shape_is_an_object(stage):
    async with stage() as (chats, _):
        (made,) = await said(chats, is_streamed=False, response_format={"type": "json_object"})
    text, _, finish = made
    assert finish == "length" or isinstance(json.loads(text), dict)


async def test_what_a_grammar_drew_is_not_trained_on(stage):
    async with stage(is_trained=True) as (chats, episode):
        first = await chats.create(**ASKED, response_format=FORMAT)
        talk = [*ASKED["messages"], first.choices[0].message, {"role": "user", "content": "on"}]
        assert episode.trajectories() == ()
        second = await chats.create(model="m", messages=talk, max_tokens=4, logprobs=True)
        (trajectory,) = episode.trajectories()
    free = [each.logprob for each in second.choices[0].logprobs.content]
    assert np.allclose(trajectory.logprobs[trajectory.sampled_mask], free)
    assert trajectory.sampled_count == len(free)


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (AstraflowError(Reason.SCORER_FAILED, "no verdict"), Outcome.SCORER_FAILED),
        (PolicyFault("too slow"), Outcome.POLICY_FAULT),
        (AstraflowError(Reason.CONTEXT_TOO_LONG, "full"), Outcome.INFRA_ERROR),
        (None, Outcome.INFRA_ERROR),
    ],
)
async def test_an_episode_of_which_nothing_is_trained_on_is_a_rollout(stage, raised, outcome):
    async with stage(is_trained=True) as (chats, episode):

        async def run(_):
            await chats.create(**ASKED, response_format=FORMAT)
            if raised is not None:
                raise raised
            return 1.0

        workflow = SimpleNamespace(run=run)
        loaded = LoadedWorkflow(workflow_id="w", workflow=workflow, scorer_digest=b"")
        rollout = await run_episode(loaded, episode)
    assert (rollout.outcome, rollout.trajectories) == (outcome, ())
    said = "without sampling" if raised is None else str(raised.message)
    assert said in rollout.failure.message


async def test_evaluations_count_all_that_was_sampled(stage):
    async with stage() as (chats, episode):
        answer = await chats.create(**ASKED, response_format=FORMAT)
        (trajectory,) = episode.trajectories()
    assert trajectory.sampled_count == answer.usage.completion_tokens


async def test_a_schema_that_cannot_be_followed_is_refused(stage):
    from openai import BadRequestError  # noqa: PLC0415

    shape = {"name": "x", "schema": {"$ref": "#/nowhere"}}
    async with stage() as (chats, _):
        with pytest.raises(BadRequestError, match="nowhere") as told:
            await chats.create(
                **ASKED, response_format={"type": "json_schema", "json_schema": shape}
            )
    assert told.value.param == "response_format"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_ids_and_likeliest_tokens_are_told(stage, folder, is_streamed):
    tokenizer = load_tokenizer(folder)
    asked = {"logprobs": True, "top_logprobs": 3, "extra_body": {"return_token_ids": True}}
    async with stage() as (chats, episode):
        made = await chats.create(**ASKED, **asked, max_tokens=6, stream=is_streamed)
        chunks = [chunk async for chunk in made] if is_streamed else [made]
        (trajectory,) = episode.trajectories()
    choice = chunks[-1].choices[0]
    assert chunks[0].prompt_token_ids == tokenizer.encode("<user>hi")
    assert choice.token_ids == trajectory.tokens[trajectory.sampled_mask].tolist()
    for each in choice.logprobs.content:
        values = [other.logprob for other in each.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert each.logprob <= values[0]


async def test_an_answer_that_was_cut_goes_on_from_its_own_tokens(stage):
    """Its text would be encoded to others, and halves of characters to none of it."""
    messages, text, tokens = ASKED["messages"], "", []
    async with stage() as (chats, episode):
        for _ in range(3):
            begun = [{"role": "assistant", "content": text}] if text else []
            made = await chats.create(
                model="m",
                messages=[*messages, *begun],
                max_tokens=3,
                extra_body={"return_token_ids": True, "continue_final_message": bool(begun)},
            )
            (choice,) = made.choices
            assert made.prompt_token_ids == tokens or not begun
            text += choice.message.content
            tokens = [*made.prompt_token_ids, *choice.token_ids]
        (trajectory,) = episode.trajectories()
        (session,) = episode._sessions
        assert session.last_text == text
    assert trajectory.tokens.tolist() == tokens
    assert trajectory.sampled_count == 9
