import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Outcome
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.runner import run_episode
from astraflow.workflows.scoring import GuardedScorer
from astraflow.workflows.single_turn import SingleTurn

SCORER = GuardedScorer(Exact(Exact.Options()), name="exact")


@pytest.mark.parametrize(("said", "reward"), [("abc", 1.0), ("cba", 0.0)])
async def test_an_answer_is_scored(parrot, episode, loaded, said, reward):
    workflow = SingleTurn(SingleTurn.Options(), SCORER)
    rollout = await run_episode(loaded(workflow), episode(solver=parrot(said)))
    assert (rollout.outcome, rollout.reward) == (Outcome.SCORED, reward)


async def test_an_answer_without_an_end_is_truncated(parrot, episode, loaded):
    workflow = SingleTurn(SingleTurn.Options(), SCORER)
    rollout = await run_episode(loaded(workflow), episode(solver=parrot("abcabcabc")))
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 0.0)


async def test_the_template_takes_the_rows_fields(parrot, episode, loaded):
    engine = parrot("abc")
    workflow = SingleTurn(SingleTurn.Options(text="sort {prompt}!"), SCORER)
    await run_episode(loaded(workflow), episode(solver=engine))
    assert engine.asked[0][0][1:] == list(map(ord, "sort cab>!"))


async def test_a_row_that_does_not_fit_the_template_says_what_it_has(parrot, episode, loaded):
    workflow = SingleTurn(SingleTurn.Options(text="{question}"), SCORER)
    rollout = await run_episode(loaded(workflow), episode(solver=parrot()))
    assert rollout.failure.reason is Reason.INVALID_FIELD
    assert "question" in rollout.failure.message
    assert "prompt, answer" in rollout.failure.message


def test_a_scorer_is_needed():
    with pytest.raises(AstraflowError, match="needs a scorer"):
        SingleTurn(SingleTurn.Options(), None)
