"""Single turn: one prompt, one answer, one score."""

from dataclasses import replace

from astraflow.workflows.episode import Episode
from astraflow.workflows.prompts import PromptOptions, show_prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, needs_scorer


class SingleTurn:
    """Shows the prompt, samples once, scores the answer."""

    Options = PromptOptions

    def __init__(self, options: PromptOptions, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._scorer = needs_scorer(scorer)

    async def run(self, episode: Episode) -> Score:
        talk = episode.trajectory()
        show_prompt(talk, self._options, episode.prompt)
        reply = await talk.sample()
        score = await self._scorer(episode.prompt, reply.text)
        return replace(score, truncated=score.truncated or reply.is_cut)
