"""How the agent of a verifiers environment speaks with its node; verifiers itself is not needed."""

import asyncio
import json

import pytest

from astraflow.config.pool import Agents
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.workflows.agents.session import AgentSession, describe
from astraflow.workflows.agents.verifiers_agent import RefusedError, serve, serve_all
from tests.pages import JsonPage, served

ROW = {"question": "?"}


class Told:
    """An environment that reports what it was told to."""

    def __init__(self, told):
        self.told = told

    async def play(self, row, session):
        assert row == ROW
        return self.told


def in_thread(call, *arguments):
    """Run what wants an event loop of its own."""

    def run():
        asyncio.set_event_loop(asyncio.new_event_loop())
        try:
            call(*arguments)
        finally:
            asyncio.get_event_loop().close()

    return asyncio.to_thread(run)


class Impatient(JsonPage):
    """Hands out one episode, and closes a connection that has had its answer unannounced."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):  # noqa: N802
        node = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        node.posted.append((self.path, json.loads(body)))
        is_over = len(node.posted) > 1 and self.path.startswith("/sessions?")
        url = f"http://127.0.0.1:{node.server_port}/sessions/s"
        said = {"task": ROW, "api_key": "k", "session_url": url}
        self.answer(said, 401 if is_over else 200)
        self.close_connection = True


def test_an_episode_may_last_longer_than_an_idle_connection(monkeypatch):
    with served(Impatient, posted=[]) as node:
        monkeypatch.setenv(
            "ASTRAFLOW_TAKE_URL", f"http://127.0.0.1:{node.server_port}/sessions?lane=a"
        )
        monkeypatch.setenv("ASTRAFLOW_TAKE_TOKEN", "t")
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            # The node has no second episode.
            with pytest.raises(RefusedError, match="401"):
                serve_all(Told({"reward": 0.5}))
        finally:
            loop.close()
            asyncio.set_event_loop(None)
    assert node.posted[1:3] == [
        ("/sessions/s/reward", {"reward": 0.5}),
        ("/sessions/s/end", {"failure": ""}),
    ]


async def test_a_reward_that_the_node_refuses_is_told(served_episode, door):
    session = AgentSession(served_episode(ROW, str))
    async with door.open(session) as entrance:
        told = {**describe(session), "session_url": entrance.session_url}
        await in_thread(serve, Told({"reward": float("nan")}), told)
        failure = await session.ended()
    assert "/reward: 400" in failure
    assert session.score is None


async def test_a_node_may_be_behind_a_certificate(served_episode, pem, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(pem.ca))
    files = {"certificate": pem.certificate, "key": pem.key}
    endpoint = AgentEndpoint(Agents(tls=files))
    session = AgentSession(served_episode(ROW, str))
    async with endpoint.open(session) as entrance:
        told = {**describe(session), "session_url": entrance.session_url}
        await in_thread(serve, Told({"reward": 0.25}), told)
        assert await session.ended() == ""
    assert session.score is not None
    assert session.score.reward == 0.25
    await endpoint.close()
