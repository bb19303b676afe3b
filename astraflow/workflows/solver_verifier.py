"""Solver and verifier: one policy answers, another says whether the answer is right.

Both are trained on the same rollout, each for its own work: an attempt's reward is the score of
that attempt, a verdict's is 1 when it agrees with the score of the attempt that it is about.
Attempts and verdicts of a round are compared with those of the same round alone. `vote` has
several answers to one prompt weighed by the verifier, for evaluation.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from pydantic import Field, model_validator

from astraflow.workflows.episode import Episode, Recorder
from astraflow.workflows.ports import Reply
from astraflow.workflows.prompts import ChatMessage, PromptOptions, fill, go_on, show_prompt
from astraflow.workflows.protocol import Score
from astraflow.workflows.scoring import GuardedScorer, needs_scorer

_VERIFY = """{prompt}

A proposed solution:

{answer}

Check each step of it. End with APPROVE if the solution is right, or with REJECT if it is wrong."""

_FORMATS = {
    "word": r"(?<!\w)({})(?!\w)",
    "tag": r"<verify>\s*({})\s*</verify>",
    "boxed": r"\\boxed\s*{{\s*(?:\\text\s*{{\s*)?({})\s*}}",
}


class PairOptions(PromptOptions):
    """Who does what, and how the verifier is asked; the prompt's own keys are the solver's."""

    solver: str = "solver"
    """The policy that answers."""
    verifier: str = "verifier"
    """The policy that judges."""
    verify: PromptOptions = PromptOptions(messages=(ChatMessage(role="user", content=_VERIFY),))
    """The verifier's prompt, its `messages` or its `text`. {answer} is what the solver wrote, never
    a field of the row."""
    verdict: Literal["word", "tag", "boxed"] = "word"
    """Where the verdict stands in what the verifier writes; the last one counts. word: anywhere;
    tag: as <verify>approve</verify>; boxed: in a box."""
    approve: str = Field(default="APPROVE", min_length=1)
    """Says that an answer is right; in capitals or not."""
    reject: str = Field(default="REJECT", min_length=1)
    """Says that it is wrong."""
    unparsed: Literal["reject", "approve"] = "reject"
    """What a text without a verdict is taken for. Its reward is 0 either way."""
    right_reward: float = 1.0
    """An answer is right when the scorer gives at least this."""
    verdict_tokens: int | None = Field(default=None, ge=1)
    """Budget of a verdict; unset: as the policy's sampling says."""

    @model_validator(mode="after")
    def _verifier_has_prompt(self) -> Self:
        if not self.verify.messages and self.verify.text is None:
            raise ValueError("'verify' needs 'messages' or 'text' with {answer} in it")
        if self.approve.casefold() == self.reject.casefold():
            raise ValueError("'approve' and 'reject' are the same word")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One attempt and its verdict.

    Attributes:
        text: What the solver wrote.
        score: What it is worth.
        is_right: Whether it is right in truth.
        critique: What the verifier wrote.
        verdict: Whether the verifier approves; None: it does not say.
        is_approved: The same, with what is left open decided.
        p_approve: The probability of that, in [0, 1].
        is_cut: Whether the attempt ran out of tokens, or left none for a verdict.
    """

    text: str
    score: Score
    is_right: bool
    critique: str
    verdict: bool | None
    is_approved: bool
    p_approve: float
    is_cut: bool

    @property
    def agrees(self) -> bool:
        """Whether there is a verdict, and a true one."""
        return self.verdict is self.is_right


class SolverVerifierPair:
    """One attempt and one verdict; what `solver_verifier` and `vote` have in common."""

    def __init__(self, options: PairOptions, scorer: GuardedScorer) -> None:
        self._options = options
        self._scorer = scorer
        words = f"{re.escape(options.approve)}|{re.escape(options.reject)}"
        self._pattern = re.compile(_FORMATS[options.verdict].format(words), re.IGNORECASE)

    def start(
        self, episode: Episode, *, number: int = 1, after: Recorder | None = None
    ) -> tuple[Recorder, Recorder]:
        """Start the trajectories of solver and verifier."""
        options, suffix = self._options, "" if number == 1 else f"/{number}"
        return (
            episode.trajectory(options.solver, agent=f"solver{suffix}", after=after),
            episode.trajectory(options.verifier, agent=f"verifier{suffix}"),
        )

    async def run(self, episode: Episode, solver: Recorder, verifier: Recorder) -> Judged:
        """Let the solver answer what it was told, the verifier judge, and reward both.

        An attempt that is too long for the verifier's context has no verdict.

        Raises:
            AstraflowError: CONTEXT_TOO_LONG when there is no room for an attempt.
        """
        options, prompt = self._options, episode.prompt
        reply = await solver.sample()
        score = await self._scorer(prompt, reply.text)
        solver.reward = score.reward
        asked = replace(prompt, fields={**prompt.fields, "answer": reply.text})
        show_prompt(verifier, options.verify, asked)
        budget = options.verdict_tokens
        limits = {} if budget is None else {"max_new_tokens": budget}
        said = await verifier.sample(**limits) if verifier.has_context else None
        verdict = None if said is None else self.verdict_of(said.text)
        is_approved = options.unparsed == "approve" if verdict is None else verdict
        judged = Judged(
            text=reply.text,
            score=score,
            is_right=score.reward >= options.right_reward,
            critique="" if said is None else said.text,
            verdict=verdict,
            is_approved=is_approved,
            p_approve=probability_of(said, is_approved=is_approved),
            is_cut=reply.is_cut or said is None,
        )
        verifier.reward = float(judged.agrees)
        return judged

    def verdict_of(self, text: str) -> bool | None:
        """Return whether a verifier approves; None: it does not say. The last verdict counts.

        Example: "I would APPROVE it, but step 2 is wrong: REJECT." rejects.
        """
        found = self._pattern.findall(text)
        return found[-1].casefold() == self._options.approve.casefold() if found else None


class SolverVerifier:
    """Attempts and verdicts in turn, until one is approved or the rounds are used up.

    A solver whose attempt was rejected reads why, and tries again in the same chat, while its
    context has room. The rollout's reward is that of the last attempt. Metrics: `rounds`,
    `first_try` and `solved` (whether the first and the last attempt are right), `verdict_right`,
    `approved` and `parsed` (shares of the verdicts that are true, that approve, and that say
    anything).
    """

    class Options(PairOptions):
        """The pair's options, and how often the solver may try."""

        max_rounds: int = Field(default=1, ge=1)
        """Attempts at most; each has a verdict."""
        feedback: str = (
            "A reviewer did not accept this solution:\n\n{verdict}\n\nSolve the problem again."
        )
        """What the solver is told after a rejected attempt; {verdict} is what the verifier wrote. A
        user's message in a chat."""

    def __init__(self, options: Options, scorer: GuardedScorer | None) -> None:
        self._options = options
        self._pair = SolverVerifierPair(options, needs_scorer(scorer))

    async def run(self, episode: Episode) -> Score:
        options = self._options
        solver, verifier = self._pair.start(episode)
        show_prompt(solver, options, episode.prompt)
        rounds = [await self._pair.run(episode, solver, verifier)]
        is_full = False
        while not rounds[-1].is_approved and len(rounds) < options.max_rounds and not is_full:
            number = len(rounds) + 1
            solver, verifier = self._pair.start(episode, number=number, after=solver)
            critique = rounds[-1].critique
            go_on(solver, fill(options.feedback, episode.prompt, verdict=critique))
            is_full = not solver.has_context
            if not is_full:
                rounds.append(await self._pair.run(episode, solver, verifier))
        last = rounds[-1]
        return replace(
            last.score,
            metrics={**last.score.metrics, **_metrics(rounds)},
            truncated=last.score.truncated or last.is_cut or is_full,
        )


def _metrics(rounds: list[Judged]) -> dict[str, float]:
    return {
        "rounds": float(len(rounds)),
        "first_try": float(rounds[0].is_right),
        "solved": float(rounds[-1].is_right),
        "verdict_right": sum(one.agrees for one in rounds) / len(rounds),
        "approved": sum(one.is_approved for one in rounds) / len(rounds),
        "parsed": sum(one.verdict is not None for one in rounds) / len(rounds),
    }


def probability_of(said: Reply | None, *, is_approved: bool) -> float:
    """Return the probability with which a verifier approves; None: it said nothing.

    Of a verdict of one token that is exact when the verifier has two words, and too high by what it
    would spend on others: p(approve) = p(the token), or 1 - p(the token) where it rejects. A
    verdict that is reasoned is taken at its word: 1 or 0.
    """
    if said is None or len(said.logprobs) != 1:
        return float(is_approved)
    share = min(1.0, math.exp(float(said.logprobs[0])))
    return share if is_approved else 1.0 - share


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
        self._pair = SolverVerifierPair(options, needs_scorer(scorer))

    async def run(self, episode: Episode) -> Score:
        pairs = [self._pair.start(episode) for _ in range(self._options.answers)]
        for solver, _ in pairs:
            show_prompt(solver, self._options, episode.prompt)
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
