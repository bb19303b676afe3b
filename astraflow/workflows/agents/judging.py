"""What an agent's episode is worth: as it says, as its scorer says, or nothing that can be told."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from astraflow.config.strict import Strict
from astraflow.core.errors import AstraflowError, Reason
from astraflow.workflows.agents.session import AgentSession, SamplingSource, SessionRules
from astraflow.workflows.episode import Episode
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer


class AgentOptions(Strict):
    """Of every workflow whose episodes are run by an agent."""

    models: dict[str, str] = Field(default={})
    """Policy by the model name that the agent asks for; `*`: any other name. Names that are left
    out mean the workflow's only policy, or have to be a policy's own."""
    sampling: Literal["recipe", "agent"] = "recipe"
    """Who chooses temperature, truncation and penalties."""
    infra_error: Literal["retry", "zero"] = "retry"
    """What an agent or an engine that fails makes of an episode. retry: a rollout that is void;
    it is run again, up to rollouts.max_attempts, then its group goes on without it. zero: a reward
    of 0 for what was sampled until then."""
    attempts: int = Field(default=3, ge=1)
    """Times that an agent is started for one episode while it samples nothing, with growing pauses;
    what fails later is run again by the hub."""


class Judge:
    """Says what an episode is worth once its agent is done."""

    def __init__(self, options: AgentOptions, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._scorer = scorer

    @property
    def rules(self) -> SessionRules:
        """How the agent may sample."""
        options = self._options
        return SessionRules(models=options.models, sampling=SamplingSource(options.sampling))

    async def score(self, session: AgentSession, answer: str) -> Score:
        """Return what an episode is worth.

        Args:
            session: Over.
            answer: What the scorer reads, if the agent reported no reward.

        Raises:
            AstraflowError: What failed in an engine; ENVIRONMENT_FAILED without reward and scorer.
        """
        session.raise_infrastructure()
        if session.score is not None:
            return session.score
        if self._scorer is None:
            raise AstraflowError(
                Reason.ENVIRONMENT_FAILED,
                "the agent reported no reward, and its workflow names no scorer; do one of the two",
            )
        score = await self._scorer(session.episode.prompt, answer)
        return replace(score, truncated=score.truncated or session.is_cut)

    def after(self, error: AstraflowError, episode: Episode) -> Score:
        """Return what an episode that failed is worth.

        Raises:
            AstraflowError: The failure, unless the recipe wants a reward of 0.
        """
        if self._options.infra_error == "retry" or not episode.has_sampled:
            raise error
        return Score(reward=0.0, parts={"infra_error": 1.0})
