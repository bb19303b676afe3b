"""Served: an agent that is started elsewhere asks the node for an episode, and ends it."""

from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.judging import AgentOptions, Judge
from astraflow.workflows.agents.session import AgentSession
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer


class Served:
    """Offers each episode to whoever asks the node for one, and waits until it is ended."""

    class Options(AgentOptions):
        """Who gets the episodes."""

        lane: str = ""
        """Agents ask for the episodes of a lane: POST /sessions?lane=..."""

    def __init__(self, options: Options, scorer: GuardedScorer | None) -> None:
        self._lane = options.lane
        self._judge = Judge(options, scorer)

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        session = AgentSession(episode, self._judge.rules)
        try:
            async with episode.door.open(session):
                episode.door.offer(session, self._lane)
                ending = await session.ended()
            if ending.failure:
                raise session.cause_of(agent_failed(f"the agent gave up: {ending.failure}"))
            return await self._judge.score(session, session.last_text)
        except AstraflowError as error:
            return self._judge.after(error, episode)


def agent_failed(message: str) -> AstraflowError:
    """Return that an agent failed; no fault of the policy."""
    return AstraflowError(Reason.ENVIRONMENT_FAILED, message, retryable=True)
