import pytest

from astraflow.core.rollouts import FinishReason, Outcome
from astraflow.workflows.multi_turn_retry import MultiTurnRetry
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.runner import run_episode
from astraflow.workflows.scoring import GuardedScorer

SCORER = GuardedScorer(Exact(Exact.Options()), name="exact")


def retry(**options):
    return MultiTurnRetry(MultiTurnRetry.Options(feedback="!", **options), SCORER)


@pytest.mark.parametrize(
    ("script", "reward", "turns"),
    [(["abc"], 1.0, 1), (["x", "abc"], 1.0, 2), (["x", "y", "abc"], 1.0, 3), (["x"] * 3, 0.0, 3)],
)
async def test_it_asks_until_the_answer_is_right(parrot, episode, loaded, script, reward, turns):
    rollout = await run_episode(loaded(retry()), episode(solver=parrot(*script)))
    assert rollout.reward == reward
    assert rollout.metrics == {"turns": turns, "solved": reward, "first_try": float(turns == 1)}


async def test_feedback_is_masked_and_comes_only_between_turns(parrot, episode, loaded):
    rollout = await run_episode(loaded(retry()), episode(solver=parrot("x", "y", "z")))
    (made,) = rollout.trajectories
    said = [chr(token) for token in made.tokens[made.sampled_mask] if token > 3]
    told = [chr(token) for token in made.tokens[~made.sampled_mask] if token > 3]
    assert "".join(said) == "xyz"
    assert "".join(told) == "cab>!!"
    assert made.finish_reason is FinishReason.TURNS


async def test_a_discount_makes_early_answers_worth_more(parrot, episode, loaded):
    rollout = await run_episode(
        loaded(retry(turn_discount=0.9)), episode(solver=parrot("x", "y", "abc"))
    )
    assert rollout.reward == pytest.approx(0.81)
    assert rollout.metrics["solved"] == 1.0


async def test_a_context_that_is_full_ends_it_with_the_last_answer(parrot, episode, loaded):
    # The prompt, an answer, the feedback and another answer fill it.
    engine = parrot("x", "y", max_context_token_count=10)
    rollout = await run_episode(loaded(retry()), episode(solver=engine))
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 0.0)
    assert rollout.metrics["turns"] == 2
    assert rollout.trajectories[0].finish_reason is FinishReason.LENGTH


async def test_a_last_answer_without_an_end_is_truncated(parrot, episode, loaded):
    rollout = await run_episode(loaded(retry()), episode(solver=parrot("x", "y", "abcabcabc")))
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 0.0)
    assert rollout.trajectories[0].finish_reason is FinishReason.LENGTH
