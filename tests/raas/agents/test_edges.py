"""What clients do wrong costs them an answer in OpenAI's form, and nobody else anything."""

import asyncio
import json
import ssl

import httpx
import pytest

from astraflow.config.pool import Agents
from astraflow.core.errors import AstraflowError, Reason
from astraflow.raas.agents.detokenizer import split_calls
from astraflow.workflows.agents.session import AgentSession

CHAT = "v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}

WRONG = {
    "no body": ("", "no body"),
    "no JSON": ("{", "body"),
    "no messages": ({"model": "m"}, "messages"),
    "empty messages": ({**HI, "messages": []}, "messages"),
    "a strange role": ({**HI, "messages": [{"role": "cat", "content": ""}]}, "messages[0].role"),
    "an image": (
        {**HI, "messages": [*HI["messages"], {"role": "user", "content": [TEXT, IMAGE]}]},
        "messages[1].content[1] is of type 'image_url'",
    ),
    "a sound": (
        {**HI, "messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
    ),
    "a tool without a function": ({**HI, "tools": [{"function": None}]}, "tools"),
    "no number": ('{"messages": [{"role": "user", "content": "hi"}], "seed": NaN}', "body"),
    "a number beyond all": ({**HI, "seed": 10**30}, "seed"),
    "too deep": ("[" * 100_000, "body"),
    "a text for a number": ({**HI, "max_tokens": "many"}, "max_tokens"),
    "too many choices": ({**HI, "n": 10**6}, "n"),
    "a strange format": ({**HI, "response_format": {"type": "xml"}}, "response_format"),
    "likeliest tokens without logprobs": ({**HI, "top_logprobs": 2}, "top_logprobs"),
    "a forced tool": ({**HI, "tool_choice": "required"}, "tool_choice"),
    "functions of old": ({**HI, "functions": [{"name": "add"}]}, "functions"),
    "a search on the web": ({**HI, "web_search_options": {"x": 1}}, "web_search_options"),
    "a voice": ({**HI, "audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    "biased tokens": ({**HI, "logit_bias": {"3": 5}}, "logit_bias"),
}


async def test_what_is_wrong_with_a_request_is_said(stage):
    async with stage(lambda text: "ok") as at, at.client() as client:
        for body, field in WRONG.values():
            content = body if isinstance(body, str) else json.dumps(body)
            answer = await client.post(CHAT, content=content)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert field in error["message"] + str(error["param"]) or field == "body"
        assert (await client.post(CHAT, json=HI)).status_code == 200
        assert len(at.episode.trajectories()) == 1


@pytest.mark.slow
async def test_what_was_cut_within_an_emoji_is_taken(stage):
    """JavaScript writes such a text as JSON, half of a surrogate pair and all."""
    async with stage(lambda text: "ok") as at, at.client() as client:
        for cut, whole in (("x\ud83d", "x\ufffd"), ("\udc80y", "\ufffdy"), ("\U0001f600",) * 2):
            answered = await client.post(CHAT, content=json.dumps({**HI, "model": cut}))
            assert (answered.status_code, answered.json()["model"]) == (200, whole)
        for body in (
            '{"model": "\\ud83"}',
            "[" * 10_000 + '"\\ud83d',
            '{"seed": NaN, "a": "\\ud83d"}',
        ):
            assert (await client.post(CHAT, content=body)).status_code == 400


def test_a_call_that_never_ends_is_looked_at_once():
    """A minute for every few thousand letters more, were it looked at from each of them."""
    text = '<tool_call>{"name": "f"' + " " * 1_000_000 + "x"
    assert split_calls(text) == (text, [])


async def test_who_is_not_known_gets_nothing(stage):
    async with stage(lambda text: "ok") as at, at.client() as client:
        root = str(client.base_url).partition("/sessions")[0]
        asked = {
            f"{root}/v1/models": 401,
            f"{root}/sessions/none/v1/models": 404,
            f"{root}/nowhere": 404,
        }
        for url, status in asked.items():
            answer = await client.get(url, headers={"Authorization": "Bearer sk-wrong"})
            assert (answer.status_code, "error" in answer.json()) == (status, True)
        taken = await client.post(f"{root}/sessions", headers={"Authorization": "Bearer x"})
        assert taken.status_code == 401
        known = {"Authorization": f"Bearer {at.endpoint.token}"}
        for wait in ("abc", "nan", "-1", ""):
            taken = await client.post(f"{root}/sessions?wait_s={wait}", headers=known)
            assert (taken.status_code, taken.json()["error"]["param"]) == (400, "wait_s")
        by_key = {"Authorization": f"Bearer {at.entrance.key}"}
        assert (await client.get(f"{root}/v1/models", headers=by_key)).status_code == 200


@pytest.mark.slow
async def test_several_policies_have_to_be_named(stage):
    terms = {"models": {"gpt-4o": "judge"}}
    async with stage(lambda text: "ok", policies=("solver", "judge"), terms=terms) as at:
        async with at.client() as client:
            unknown = await client.post(CHAT, json=HI)
            mapped = await client.post(CHAT, json={**HI, "model": "gpt-4o"})
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert mapped.status_code == 200
        assert [each.policy_id for each in at.episode.trajectories()] == ["judge"]


@pytest.mark.parametrize("name", ["gpt", "*"])
async def test_a_model_that_means_no_policy_is_told_before_anything_is_asked(stage, name):
    with pytest.raises(AstraflowError, match="has no policy coder, only solver, judge"):
        async with stage(policies=("solver", "judge"), terms={"models": {name: "coder"}}):
            pass


async def test_too_much_at_once_is_to_come_again(stage):
    agents = Agents(max_requests=1, max_body_nbytes=1024)
    async with stage(lambda text: "ok", agents=agents) as at, at.client() as client:
        at.engine.open.clear()
        first = asyncio.create_task(client.post(CHAT, json=HI))
        await at.engine.until(lambda: at.engine.running)
        for more in ({}, {"stream": True}):
            refused = await client.post(CHAT, json=HI | more)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        at.engine.open.set()
        assert (await first).status_code == 200
        large = await client.post(CHAT, content=b" " * 2048)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.slow
async def test_who_finds_no_room_is_at_no_fault_until_it_is_answered(stage):
    async with stage(lambda text: "ok", agents=Agents(max_requests=1)) as at, at.client() as client:
        refused = await client.post(CHAT, json=HI | {"n": 2})
        assert refused.status_code == 429
        with pytest.raises(AstraflowError, match="max_requests") as caught:
            at.session.raise_infrastructure()
        assert caught.value.reason is Reason.OVERLOADED
        assert (await client.post(CHAT, json=HI)).status_code == 200
        at.session.raise_infrastructure()


@pytest.mark.slow
async def test_a_prompt_that_is_too_long_is_refused_even_as_a_stream(stage):
    async with stage(lambda text: "ok", max_context=8) as at, at.client() as client:
        for more in ({}, {"stream": True}):
            answer = await client.post(CHAT, json=HI | more)
            told = answer.json()["error"]
            assert told["code"] == "context_length_exceeded"
            # By which agents on litellm, and Claude Code, know it and shorten the chat.
            assert "prompt is too long: 9 tokens > 7 maximum" in told["message"]
            assert "This model's maximum context length is 8 tokens" in told["message"]


async def test_an_agent_that_made_room_is_not_said_to_have_failed_for_a_full_context(stage):
    failure = AstraflowError(Reason.ENVIRONMENT_FAILED, "no such tool", retryable=True)
    async with stage(lambda text: "ok", max_context=12) as at, at.client() as client:
        long = {"messages": [{"role": "user", "content": "a long one"}]}
        assert (await client.post(CHAT, json=long)).status_code == 400
        assert at.session.cause_of(failure).reason is Reason.CONTEXT_TOO_LONG
        assert (await client.post(CHAT, json=HI)).status_code == 200
        assert at.session.cause_of(failure) is failure


@pytest.mark.slow
async def test_a_client_that_leaves_takes_its_request_along(stage):
    async with stage(lambda text: "ok") as at, at.client() as client:
        at.engine.open.clear()
        for more in ({}, {"stream": True}):
            leaving = asyncio.create_task(client.post(CHAT, json=HI | more))
            await at.engine.until(lambda: at.engine.running)
            leaving.cancel()
            await asyncio.wait({leaving})
            while at.engine.running:  # noqa: ASYNC110 - the server makes it true
                await asyncio.sleep(0)
        at.engine.open.set()
        assert not at.episode.trajectories()


async def test_an_end_stops_what_runs_and_nothing_runs_after_it(stage):
    async with stage(lambda text: "ok") as at, at.client() as client:
        at.engine.open.clear()
        running = asyncio.create_task(client.post(CHAT, json=HI))
        await at.engine.until(lambda: at.engine.running)
        told = await client.post("reward", json={"reward": 0.5, "parts": {"right": 1.0}})
        assert (told.status_code, at.session.score.reward) == (200, 0.5)
        assert (await client.post("reward", json={"reward": "high"})).status_code == 400
        assert (await client.post("end", json={"failure": "no tool"})).status_code == 200
        assert (await running).json()["error"]["code"] == "session_over"
        assert (await client.post(CHAT, json=HI)).status_code == 410
        assert await at.session.ended() == "no tool"


@pytest.mark.slow
async def test_who_dawdles_is_cut_off(stage):
    agents = Agents(patience_s=0.05)
    async with stage(lambda text: "ok", agents=agents) as at:
        host, port = at.entrance.session_url.split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow")
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        path = f"/sessions/{at.session.session_id}/{CHAT}"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n".encode()
        writer.write(head + b"{")
        assert b" 408 " in await reader.readline()
        writer.close()


@pytest.mark.slow
async def test_the_recipe_says_how_is_sampled_unless_it_leaves_that_to_the_agent(stage):
    for is_agents, temperature in ((False, 1.0), (True, 0.0)):
        async with stage(lambda text: "ok", terms={"chooses_sampling": is_agents}) as at:
            async with at.client() as client:
                await client.post(CHAT, json={**HI, "temperature": 0.0, "max_tokens": 1000})
            (trajectory,) = at.episode.trajectories()
            assert trajectory.sampling.temperature == temperature
            assert trajectory.sampling.max_new_tokens == 32


@pytest.mark.slow
async def test_what_an_agent_samples_at_another_temperature_is_a_trajectory_of_its_own(stage):
    terms = {"chooses_sampling": True}
    async with stage(lambda text: str(text.count("[u]")), terms=terms, is_trained=True) as at:
        async with at.client() as client:
            chat = []
            for number, temperature in enumerate((0.5, 1.0, 0.5), start=1):
                chat.append({"role": "user", "content": "x"})
                asked = {"model": "m", "messages": chat, "temperature": temperature}
                told = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]
                assert told["content"] == str(number)
                chat.append(told)
        trajectories = at.episode.trajectories()
    decode = at.episode.port().tokenizer.decode
    assert [
        (each.sampling.temperature, decode(each.tokens), decode(each.tokens[each.sampled_mask]))
        for each in trajectories
    ] == [
        (1.0, "[u]x;[a]1;[u]x;[a]2", "2"),
        (0.5, "[u]x;[a]1;[u]x;[a]2;[u]x;[a]3", "13"),
    ]


@pytest.mark.slow
async def test_an_engine_that_fails_is_no_fault_of_the_policy_until_it_is_mended(stage):
    async with stage(lambda text: "ok") as at, at.client() as client:
        at.engine.version = None
        failed = await client.post(CHAT, json=HI)
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        with pytest.raises(AstraflowError) as caught:
            at.session.raise_infrastructure()
        assert caught.value.reason is Reason.VERSION_NOT_SERVED
        at.engine.version = 1
        await client.post(CHAT, json=HI)
        at.session.raise_infrastructure()


async def test_agents_show_a_certificate_where_one_is_asked_for(stage, pem):
    known = ssl.create_default_context(cafile=pem.ca)
    shown = ssl.create_default_context(cafile=pem.ca)
    shown.load_cert_chain(pem.certificate, pem.key)
    files = {"certificate": pem.certificate, "key": pem.key, "ca": pem.ca}
    agents = Agents(tls=files)
    async with stage(lambda text: "ok", agents=agents) as at:
        assert at.entrance.base_url.startswith("https://")
        assert (await at.endpoint.queue("lane"))[0].startswith("https://")
        async with at.client(verify=shown) as client:
            assert (await client.post(CHAT, json=HI)).status_code == 200
        async with at.client(verify=known) as client:
            with pytest.raises(httpx.TransportError):
                await client.post(CHAT, json=HI)


async def test_a_row_of_which_json_has_no_word_is_told(stage):
    """Numbers that are none come of columns with holes, half a surrogate pair of a cut emoji."""
    fields = {"prompt": "hi\ud83d", "seen": [1.5, float("nan"), float("inf")]}
    async with stage(lambda text: "ok", fields=fields) as at:
        url, token = await at.endpoint.queue("")
        at.endpoint.offer(at.session, "")
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as client:
            taken = (await client.post(url)).json()
            shown = (await client.get(taken["session_url"])).json()
    assert taken["task"] == shown["task"] == {"prompt": "hi\ufffd", "seen": [1.5, None, None]}


async def test_sessions_that_nobody_asked_for_in_time_are_not_kept(stage):
    async with stage() as at:
        for lane in ("lane", "lane", "of a program that died"):
            session = AgentSession(at.episode)
            async with at.endpoint.open(session):
                at.endpoint.offer(session, lane)
        at.endpoint.offer(at.session, "lane")
        assert len(at.endpoint._offered) == 1
        assert await at.endpoint.take("lane", wait_s=10) is at.session


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_that_breaks_is_no_fault_of_the_policy(stage, is_streamed):
    async with stage(lambda text: str(1 / text.count("!"))) as at, at.client() as client:
        answer = await client.post(CHAT, json={**HI, "stream": is_streamed})
        assert answer.status_code == (200 if is_streamed else 500)
        assert "the node broke: ZeroDivisionError" in answer.text
        with pytest.raises(AstraflowError, match="ZeroDivisionError") as caught:
            at.session.raise_infrastructure()
        assert caught.value.reason is Reason.INTERNAL


async def test_a_key_is_shown_as_http_has_it(stage):
    async with stage(lambda text: "ok") as at, at.client() as client:
        url = at.entrance.base_url.replace(f"/sessions/{at.session.session_id}", "")
        for scheme, status in (("Bearer", 200), ("bearer", 200), ("Basic", 401)):
            headers = {"Authorization": f"{scheme} {at.session.key}"}
            answer = await client.post(f"{url}/chat/completions", json=HI, headers=headers)
            assert answer.status_code == status
