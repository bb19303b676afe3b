import math

import numpy as np
import pytest

from astraflow.core.rollouts import FinishReason, Outcome
from astraflow.workflows.ports import Reply
from astraflow.workflows.rewards.exact import Exact
from astraflow.workflows.runner import run_episode
from astraflow.workflows.scoring import GuardedScorer
from astraflow.workflows.solver_verifier import SolverVerifier, probability_of_yes

SCORER = GuardedScorer(Exact(Exact.Options()), name="exact")


@pytest.mark.parametrize(
    ("answer", "verdict", "rewards"),
    [("abc", "y", (1, 1)), ("abc", "n", (1, 0)), ("cba", "y", (0, 0)), ("cba", "n", (0, 1))],
)
async def test_each_is_rewarded_for_its_own_work(parrot, episode, loaded, answer, verdict, rewards):
    workflow = SolverVerifier(SolverVerifier.Options(), SCORER)
    rollout = await run_episode(
        loaded(workflow), episode(solver=parrot(answer), verifier=parrot(verdict))
    )
    assert rollout.outcome is Outcome.SCORED
    assert rollout.reward == rewards[0]
    by_policy = {part.policy_id: part.reward for part in rollout.trajectories}
    assert by_policy == {"solver": rewards[0], "verifier": rewards[1]}
    assert rollout.metrics["verdict_right"] == rewards[1]


async def test_the_verifier_sees_the_prompt_and_the_answer(parrot, episode, loaded):
    judge = parrot("y")
    workflow = SolverVerifier(SolverVerifier.Options(), SCORER)
    await run_episode(loaded(workflow), episode(solver=parrot("ab"), verifier=judge))
    tokens, sampling, _ = judge.asked[0]
    assert tokens[1:] == list(map(ord, "cab>ab?"))
    assert sampling.max_new_tokens == 1


@pytest.mark.parametrize(("text", "expected"), [("y", 0.8), ("n", 0.2), ("", 0.2)])
def test_the_probability_of_a_yes_is_that_of_the_token(text, expected):
    verdict = Reply(
        text=text,
        tokens=np.array([5], np.int32),
        logprobs=np.array([math.log(0.8)], np.float32),
        finish_reason=FinishReason.LENGTH,
    )
    assert probability_of_yes(verdict, "y") == pytest.approx(expected)


def test_no_token_is_a_no():
    empty = np.zeros(0, np.float32)
    verdict = Reply(text="", tokens=empty, logprobs=empty, finish_reason=FinishReason.LENGTH)
    assert probability_of_yes(verdict, "y") == 0.0
