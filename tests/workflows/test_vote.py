import math

import pytest

from astraflow.workflows.prompts import PromptOptions
from astraflow.workflows.protocol import Score
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.runner import run_episode
from astraflow.workflows.scoring import GuardedScorer
from astraflow.workflows.solver_verifier import Judged, Vote, count_votes


def judged(text, p_yes, *, right="ba"):
    return Judged(
        text=text,
        score=Score(reward=float(text == right)),
        is_right=text == right,
        critique="",
        verdict=p_yes > 0.5,
        is_approved=p_yes > 0.5,
        p_approve=p_yes,
        is_cut=False,
    )


def test_the_weighted_vote_can_overrule_the_majority():
    score = count_votes([judged("ab", 0.2), judged("ba", 0.9), judged("ab", 0.3)])
    assert score.reward == 1.0
    assert score.metrics == {
        "single": pytest.approx(1 / 3),
        "majority": 0.0,
        "best": 1.0,
        "weighted": 1.0,
        "verdict_right": 1.0,
    }


def test_many_lukewarm_verdicts_outweigh_one_warm_one():
    score = count_votes([judged("ba", 0.4), judged("ab", 0.6), judged("ba", 0.4)])
    assert (score.metrics["best"], score.metrics["weighted"]) == (0.0, 1.0)


def test_the_first_of_equals_wins():
    assert count_votes([judged("ba", 0.5), judged("ab", 0.5)]).reward == 1.0
    assert count_votes([judged("ab", 0.5), judged("ba", 0.5)]).reward == 0.0


async def test_answers_and_verdicts_share_one_rollout(parrot, episode, loaded):
    verify = PromptOptions(text="{prompt}{answer}?")
    options = Vote.Options(answers=3, verify=verify, approve="y", reject="n", verdict_tokens=1)
    workflow = Vote(options, GuardedScorer(Exact(Exact.Options()), name="exact"))
    solver, verifier = parrot(*["abc"] * 3), parrot(*["y"] * 3, logprob=math.log(0.9))
    rollout = await run_episode(loaded(workflow), episode(solver=solver, verifier=verifier))
    assert rollout.reward == 1.0
    assert len(rollout.trajectories) == 6
    assert len({asked[1].seed for asked in solver.asked}) == 3
