"""Solver and verifier: one policy answers, another says whether the answer is right.

Both are trained on the same rollout, each for its own work: the solver's reward is the
score of the answer, the verifier's is 1 when its verdict agrees with the score.
"""

import math
from dataclasses import dataclass, replace

from pydantic import Field

from astraflow.config.recipe import Strict
from astraflow.workflows.episode import Episode, Recorder
from astraflow.workflows.ports import Reply
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, needs_scorer
from astraflow.workflows.single_turn import fill


class PairOptions(Strict):
    """Who does what, and how the verifier is asked."""

    solver: str = "solver"
    """The policy that answers."""
    verifier: str = "verifier"
    """The policy that judges."""
    template: str = "{prompt}"
    """The text for the solver, with the row's fields in braces."""
    question: str = "{prompt}{answer}?"
    """The text for the verifier: the row's fields, and the solver's answer."""
    yes: str = "y"
    """What the verifier says of a right answer; anything else is a no."""
    right_reward: float = 1.0
    """An answer is right when the scorer gives at least this."""
    verdict_tokens: int = Field(1, ge=1)
    """Budget of a verdict; its first token decides the probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One answer and its verdict.

    Attributes:
        text: The answer.
        score: What it is worth.
        is_right: Whether it is right in truth.
        says_yes: Whether the verifier says so.
        p_yes: Its probability of a yes, in [0, 1].
        is_cut: Whether the answer ran out of tokens.
    """

    text: str
    score: Score
    is_right: bool
    says_yes: bool
    p_yes: float
    is_cut: bool

    @property
    def agrees(self) -> bool:
        """Whether the verdict is true."""
        return self.says_yes == self.is_right


class Pair:
    """One answer and one verdict; what `solver_verifier` and `vote` have in common."""

    def __init__(self, options: PairOptions, scorer: GuardedScorer) -> None:
        self._options = options
        self._scorer = scorer

    def start(self, episode: Episode) -> tuple[Recorder, Recorder]:
        """Start the trajectories of solver and verifier."""
        options = self._options
        return (
            episode.trajectory(options.solver, agent="solver"),
            episode.trajectory(options.verifier, agent="verifier"),
        )

    async def run(self, episode: Episode, solver: Recorder, verifier: Recorder) -> Judged:
        """Let the solver answer and the verifier judge, and reward both trajectories."""
        options = self._options
        solver.observe(fill(options.template, episode.prompt))
        reply = await solver.sample()
        score = await self._scorer(episode.prompt, reply.text)
        asked = replace(episode.prompt, fields={**episode.prompt.fields, "answer": reply.text})
        verifier.observe(fill(options.question, asked))
        verdict = await verifier.sample(max_new_tokens=options.verdict_tokens)
        judged = Judged(
            text=reply.text,
            score=score,
            is_right=score.reward >= options.right_reward,
            says_yes=verdict.text == options.yes,
            p_yes=probability_of_yes(verdict, options.yes),
            is_cut=reply.is_cut,
        )
        solver.reward = score.reward
        verifier.reward = float(judged.agrees)
        return judged


class SolverVerifier:
    """One answer and one verdict a rollout; the rollout's reward is the answer's.

    Metrics: `verdict_right`, `says_yes`.
    """

    Options = PairOptions

    def __init__(self, options: PairOptions, scorer: GuardedScorer | None) -> None:
        self._pair = Pair(options, needs_scorer(scorer))

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        judged = await self._pair.run(episode, *self._pair.start(episode))
        metrics = {
            "verdict_right": float(judged.agrees),
            "says_yes": float(judged.says_yes),
        }
        return replace(
            judged.score,
            metrics={**judged.score.metrics, **metrics},
            truncated=judged.score.truncated or judged.is_cut,
        )


def probability_of_yes(verdict: Reply, yes: str) -> float:
    """Return the verifier's probability of a yes, from the first token that it sampled.

    A no has the rest of the probability: p(yes) = 1 - p(the token) is exact when the
    verifier has two words, and too high by what it would spend on others. A verdict
    without a token is a no for sure.
    """
    if not len(verdict.logprobs):
        return 0.0
    share = min(1.0, math.exp(float(verdict.logprobs[0])))
    return share if verdict.text == yes else 1.0 - share
