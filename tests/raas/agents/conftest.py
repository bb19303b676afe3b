"""An endpoint over a real socket, with an episode of a small engine open on it."""

from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from astraflow.config.pool import Agents
from astraflow.core.tasks import SamplingParams
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.testing import CharTokenizer, SmallEngine
from astraflow.workflows.agents.session import AgentSession, SessionEndpoint
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from made_up import made_up_task

CHAT = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %};{% endfor %}[a]"
)


@dataclass(kw_only=True)
class Stage:
    """An endpoint and what is open on it."""

    endpoint: AgentEndpoint
    episode: Episode
    session: AgentSession
    entrance: SessionEndpoint
    engine: SmallEngine

    def client(self, **settings) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.entrance.session_url, **settings)


def make_episode(
    engine, *, policies=("solver",), sampling=None, door=None, fields=None, is_trained=False
):
    sampling = sampling or SamplingParams(max_new_tokens=32, seed=5)
    task = made_up_task(
        fields or {"prompt": "hi"}, task_id="t1", sampling=dict.fromkeys(policies, sampling)
    )
    ports = {
        name: PolicyPort(
            policy_id=name,
            engine=engine,
            tokenizer=CharTokenizer(),
            sampling=sampling,
            template=ChatTemplate(CHAT),
            is_trained=is_trained,
        )
        for name in policies
    }
    return Episode(task=task, sample_index=0, policies=ports, agent_server=door)


@pytest.fixture
def stage():
    @asynccontextmanager
    async def make(answer=None, *, agents=None, terms=None, max_context=4096, **episode):
        engine = SmallEngine(answer=answer, max_context_token_count=max_context)
        engine.version = 0
        endpoint = AgentEndpoint(agents or Agents())
        run = make_episode(engine, door=endpoint, **episode)
        session = AgentSession(run, **(terms or {}))
        try:
            async with endpoint.open(session) as entrance:
                yield Stage(
                    endpoint=endpoint,
                    episode=run,
                    session=session,
                    entrance=entrance,
                    engine=engine,
                )
        finally:
            await endpoint.close()

    return make
