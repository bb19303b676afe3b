"""A judge is asked over a real socket; the endpoint that agents are served by is one."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.rewards.judge import Judge
from crash_ends.postgres import free_port


@pytest.fixture
def bench(door, served_episode):
    """Open an endpoint whose model judges as it is told; what it was asked is kept."""

    @asynccontextmanager
    async def opened(says, **options):
        asked = []

        def answer(text):
            asked.append(text)
            return says

        run = served_episode({"prompt": "2 + 2?"}, answer, max_new_tokens=64)
        session = AgentSession(run)
        async with door.open(session) as entrance:
            judge = Judge(Judge.Options(base_url=entrance.base_url, model="judge", **options))
            yield judge, run, session, asked

    return opened


async def test_the_last_number_that_a_judge_gives_is_the_reward(bench):
    async with bench("Score: 2? No.\nScore: 7.5") as (judge, run, _, asked):
        score = await judge(run.prompt, "4")
    assert score.reward == 0.75
    assert "2 + 2?" in asked[0]
    assert "Answer:\n4" in asked[0]


async def test_a_question_may_have_the_braces_of_json(bench):
    question = 'Task: {prompt} Answer: {text}\nEnd with {"score": N}.'
    pattern = r'"score": (\d+)'
    async with bench('{"score": 5}', question=question, pattern=pattern) as (judge, run, _, asked):
        score = await judge(run.prompt, "4")
    assert score.reward == 0.5
    assert 'Task: 2 + 2? Answer: 4\nEnd with {"score": N}.' in asked[0]


@pytest.mark.slow
async def test_a_judge_without_a_number_is_no_reward_of_zero(bench):
    async with bench("It is good.") as (judge, run, _, _):
        with pytest.raises(AstraflowError, match="gave prompt p no score") as caught:
            await judge(run.prompt, "4")
    assert caught.value.reason is Reason.SCORER_FAILED


@pytest.mark.slow
async def test_a_judge_that_refuses_or_is_away_has_failed(bench):
    away = Judge(Judge.Options(base_url=f"http://127.0.0.1:{free_port()}/v1", model="m"))
    async with bench("Score: 1") as (judge, run, session, _):
        session.end()
        for each, why in ((judge, "410"), (away, "failed")):
            with pytest.raises(AstraflowError, match=why) as caught:
                await each(run.prompt, "4")
            assert caught.value.reason is Reason.SCORER_FAILED


@pytest.mark.slow
@pytest.mark.parametrize("status", ["429 Too Many Requests", "503 Service Unavailable"])
async def test_a_judge_that_is_busy_is_asked_again(monkeypatch, status):
    monkeypatch.setattr("astraflow.workflows.rewards.judge._PAUSES_S", (0.0, 0.0))
    statuses = iter([status, "200 OK", *[status] * 3])
    said = b'{"choices": [{"message": {"content": "Score: 5"}}]}'

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split()[0]))
        length = f"content-length: {len(said)}\r\nconnection: close\r\n\r\n"
        writer.write(f"HTTP/1.1 {next(statuses)}\r\n{length}".encode() + said)
        writer.close()

    prompt = Prompt(prompt_id="1", data_set="train", fields={"prompt": "2 + 2?"})
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        judge = Judge(Judge.Options(base_url=f"http://127.0.0.1:{port}/v1", model="judge"))
        assert (await judge(prompt, "4")).reward == 0.5
        with pytest.raises(AstraflowError, match=status[:3]) as caught:
            await judge(prompt, "4")
    assert caught.value.reason is Reason.SCORER_FAILED
    assert not list(statuses)


@pytest.mark.slow
async def test_a_judge_that_thinks_for_too_long_is_given_up(bench):
    async with bench("Score: 1", time_s=0.05) as (judge, run, _, _):
        engine = run.port().engine
        engine.open.clear()
        with pytest.raises(AstraflowError) as caught:
            await judge(run.prompt, "4")
        assert caught.value.reason is Reason.SCORER_TIMEOUT
        # What it was asked for is withdrawn with the connection.
        while engine.running:  # noqa: ASYNC110 - the server makes it true
            await asyncio.sleep(0)
