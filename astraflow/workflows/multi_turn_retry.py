"""Multi-turn retry: a wrong answer is told to be wrong, and may be given again."""

from dataclasses import replace

from pydantic import Field

from astraflow.core.rollouts import FinishReason
from astraflow.workflows.episode import Episode
from astraflow.workflows.prompts import PromptOptions, fill, go_on, show_prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, needs_scorer


class MultiTurnRetry:
    """Asks until the answer is right, or the turns or the context are used up.

    One trajectory: what the environment says between the turns is in it, masked. Metrics:
    `turns`, `solved` and `first_try`.

    Example: with a turn_discount of 0.9, right at the third try is worth 0.9 ** 2 = 0.81.
    """

    class Options(PromptOptions):
        """When it ends, and what is said in between."""

        feedback: str = "That is not right. Try again.\n"
        """What the policy is told after a wrong answer, with the row's fields in braces: a user's
        message in a chat."""
        max_turns: int = Field(3, ge=1)
        """Answers at most."""
        right_reward: float = 1.0
        """An answer is right when the scorer gives at least this."""
        turn_discount: float = Field(1.0, gt=0, le=1)
        """Factor on the reward for every turn but the first."""

    def __init__(self, options: Options, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._scorer = needs_scorer(scorer)

    async def run(self, episode: Episode) -> Score:
        options = self._options
        talk = episode.trajectory()
        show_prompt(talk, options, episode.prompt)
        turn, is_full = 0, False
        while True:
            reply = await talk.sample()
            score = await self._scorer(episode.prompt, reply.text)
            is_right = score.reward >= options.right_reward
            turn += 1
            if is_right or turn == options.max_turns:
                break
            go_on(talk, fill(options.feedback, episode.prompt))
            is_full = not talk.has_context
            if is_full:
                break
        is_cut = is_full or reply.is_cut
        if not is_right:
            talk.finish_reason = FinishReason.LENGTH if is_cut else FinishReason.TURNS
        metrics = {
            "turns": float(turn),
            "solved": float(is_right),
            "first_try": float(is_right and turn == 1),
        }
        return replace(
            score,
            reward=score.reward * options.turn_discount ** (turn - 1),
            metrics={**score.metrics, **metrics},
            truncated=score.truncated or is_cut,
        )
