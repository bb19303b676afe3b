"""Vote: several answers to one prompt, weighed by the verifier. For evaluation."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from pydantic import Field

from astraflow.workflows.episode import Episode
from astraflow.workflows.prompts import tell
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, needs_scorer
from astraflow.workflows.solver_verifier import Judged, Pair, PairOptions


class Vote:
    """Samples answers and verdicts, and rewards what the weighted vote elects.

    Metrics, all of the same samples: `single` (mean of the answers), `majority` (the text
    given most often), `best` (the answer that the verifier likes best), `weighted` (the text with
    the largest sum of the verifier's probabilities; a verdict of several tokens counts 1 or 0). The
    first of equals wins.

    Example: ab with 0.2, ba with 0.9, ab with 0.3: the majority is ab, the best is ba, and
    the weighted vote is ba, because 0.9 > 0.2 + 0.3.
    """

    class Options(PairOptions):
        """The pair's options, and how many vote."""

        answers: int = Field(4, ge=1)
        """Answers per prompt."""

    def __init__(self, options: Options, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._pair = Pair(options, needs_scorer(scorer))

    async def run(self, episode: Episode) -> Score:
        """Run one episode."""
        pairs = [self._pair.start(episode) for _ in range(self._options.answers)]
        for solver, _ in pairs:
            tell(solver, self._options, episode.prompt)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._pair.run(episode, *pair)) for pair in pairs]
        return count_votes([task.result() for task in tasks])


def count_votes(judged: Sequence[Judged]) -> Score:
    """Return the reward of the weighted vote, with the other ways to choose as metrics."""
    weighted = _elect(judged, lambda one: one.p_approve)
    majority = _elect(judged, lambda _: 1.0)
    best = max(judged, key=lambda one: one.p_approve)
    return Score(
        reward=float(weighted.is_right),
        metrics={
            "single": sum(one.is_right for one in judged) / len(judged),
            "majority": float(majority.is_right),
            "best": float(best.is_right),
            "weighted": float(weighted.is_right),
            "verdict_right": sum(one.agrees for one in judged) / len(judged),
        },
    )


def _elect(judged: Sequence[Judged], weight: Callable[[Judged], float]) -> Judged:
    """Return an answer whose text has the largest weight; the first of equals."""
    votes: dict[str, float] = defaultdict(float)
    for one in judged:
        votes[one.text] += weight(one)
    elected = max(votes, key=votes.__getitem__)
    return next(one for one in judged if one.text == elected)
