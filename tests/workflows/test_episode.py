from dataclasses import replace

import numpy as np
import pytest

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason
from astraflow.workflows.episode import Episode
from astraflow.workflows.turns import trajectory_seed


async def test_what_is_sampled_is_marked_and_what_is_observed_is_not(parrot, episode):
    engine = parrot("ab", "c")
    run = episode(solver=engine)
    talk = run.trajectory(agent="me")
    talk.observe("x>")
    first = await talk.sample()
    talk.observe("!")
    await talk.sample()
    (made,) = run.trajectories()
    assert made.tokens.tolist() == [2, *map(ord, "x>ab"), 3, ord("!"), ord("c"), 3]
    assert made.sampled_mask.astype(int).tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 1]
    assert np.allclose(made.logprobs, -0.5 * made.sampled_mask)
    assert [(span.version, span.length) for span in made.version_spans] == [(4, 3), (4, 2)]
    assert (made.agent, made.engine, made.finish_reason) == ("me", "parrot/1", FinishReason.STOP)
    assert first.text == "ab"
    assert talk.text == "x>ab!c"


async def test_turns_are_rewarded_at_their_last_token(parrot, episode):
    run = episode(solver=parrot("ab", "c", "d"))
    talk = run.trajectory()
    talk.observe("x>")
    with pytest.raises(AstraflowError, match="needs a turn"):
        talk.reward_turn(1.0)
    await talk.sample()
    talk.reward_turn(0.5)
    talk.observe("!")
    await talk.sample()
    await talk.sample()
    talk.reward_turn(1.0)
    talk.reward_turn(-0.25)
    (made,) = run.trajectories()
    rewards = made.columns["token_rewards"].values
    ends = [5, len(made.tokens) - 1]
    assert np.flatnonzero(rewards).tolist() == ends
    assert rewards[ends].tolist() == [0.5, 0.75]
    with pytest.raises(AstraflowError, match="to be finite"):
        talk.reward_turn(float("nan"))


async def test_the_engine_sees_all_that_came_before(parrot, episode):
    engine = parrot("a", "b", "c")
    talk = episode(solver=engine).trajectory()
    talk.observe([5, 6])
    await talk.sample()
    await talk.sample(temperature=0.5)
    assert [asked[0] for asked in engine.asked[:2]] == [[5, 6], [5, 6, ord("a"), 3]]
    await talk.sample()
    assert [asked[1].temperature for asked in engine.asked] == [1.0, 0.5, 0.5]


async def test_only_the_start_gets_a_start_token(parrot, episode):
    talk = episode(solver=parrot()).trajectory()
    talk.observe("a")
    talk.observe("b")
    assert talk.token_count == 3


async def test_trajectories_draw_with_seeds_of_their_own(parrot, episode):
    engine = parrot("a", "a")
    run = episode(solver=engine)
    talks = [run.trajectory(), run.trajectory()]
    for talk in talks:
        talk.observe("x")
        await talk.sample()
    assert [asked[1].seed for asked in engine.asked] == [11, trajectory_seed(11, 1)]
    assert 0 <= trajectory_seed(11, 1) < 2**63
    assert trajectory_seed(None, 3) is None


async def test_trajectories_are_numbered_within_the_rollout_and_the_policy(parrot, episode):
    run = episode(solver=parrot("a", "b"), verifier=parrot("y"))
    for policy in ("solver", "verifier", "solver"):
        talk = run.trajectory(policy)
        talk.observe("x")
        await talk.sample()
    made = run.trajectories()
    assert [part.trajectory_id for part in made] == ["t7/2/0", "t7/2/1", "t7/2/2"]
    assert [part.segment_index for part in made] == [0, 0, 1]


def test_a_trajectory_without_a_sampled_token_is_left_out(parrot, episode):
    run = episode(solver=parrot())
    run.trajectory().observe("x")
    assert run.trajectories() == ()


def test_a_policy_that_the_workflow_does_not_have_is_an_error(parrot, episode):
    with pytest.raises(AstraflowError, match="no policy judge, only solver"):
        episode(solver=parrot()).trajectory("judge")


async def test_the_budget_fits_the_context(parrot, episode):
    engine = parrot("abcdef", max_context_token_count=6)
    talk = episode(solver=engine).trajectory()
    talk.observe([9, 9, 9])
    reply = await talk.sample()
    assert (reply.text, reply.is_cut) == ("abc", True)
    with pytest.raises(AstraflowError) as caught:
        await talk.sample()
    assert caught.value.reason is Reason.CONTEXT_TOO_LONG
    assert "max_prompt_chars" in caught.value.message


async def test_a_branch_goes_on_from_another_trajectory_with_a_reward_of_its_own(parrot, episode):
    engine = parrot("ab", "c", "d")
    run = episode(solver=engine)
    first = run.trajectory(agent="try-1")
    first.observe("x>")
    await first.sample()
    second = run.trajectory(agent="try-2", after=first)
    second.observe("!")
    await second.sample()
    third = run.trajectory(agent="try-3", after=second)
    third.observe("?")
    await third.sample()
    first.reward, second.reward, third.reward = 0.0, 0.5, 1.0
    one, two, three = run.trajectories()
    assert two.tokens.tolist() == [*one.tokens.tolist(), ord("!"), ord("c"), 3]
    assert three.tokens.tolist() == [*two.tokens.tolist(), ord("?"), ord("d"), 3]
    assert [each.sampled_mask.sum() for each in (one, two, three)] == [3, 2, 2]
    assert [each.parent_trajectory_id for each in (one, two, three)] == [None, "t7/2/0", "t7/2/1"]
    assert [each.branch_offset for each in (one, two, three)] == [0, 6, 9]
    assert [each.reward for each in (one, two, three)] == [0.0, 0.5, 1.0]
    assert len({asked[1].seed for asked in engine.asked}) == 3


async def test_a_branch_of_a_trajectory_without_an_answer_has_its_prompt(parrot, episode):
    run = episode(solver=parrot("a"), other=parrot())
    first = run.trajectory()
    first.observe("x>")
    second = run.trajectory(after=first)
    await second.sample()
    first.observe("not for the branch")
    (made,) = run.trajectories()
    assert (made.parent_trajectory_id, made.tokens.tolist()[:3]) == (None, [2, ord("x"), ord(">")])
    with pytest.raises(AstraflowError, match="their tokens differ"):
        run.trajectory("other", after=first)


async def test_what_was_told_after_the_last_answer_is_left_out(parrot, episode):
    run = episode(solver=parrot("a"))
    talk = run.trajectory()
    talk.observe("x")
    await talk.sample()
    talk.observe("bye")
    assert run.trajectories()[0].tokens.tolist() == [2, ord("x"), ord("a"), 3]


@pytest.mark.parametrize(
    "knobs",
    [
        {"top_p": 0.95},
        {"top_k": 50},
        {"min_p": 0.1},
        {"temperature": 0.0},
        {"min_new_tokens": 2},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
    ],
)
async def test_what_a_trainer_cannot_score_is_not_sampled_in_training(parrot, episode, knobs):
    run = episode(solver=parrot("a", "b"))
    evaluated = run.trajectory()
    evaluated.observe("x")
    assert (await evaluated.sample(**knobs)).text == "a"
    port = replace(run.port("solver"), is_trained=True)
    trained = Episode(task=run.task, sample_index=0, policies={"solver": port}).trajectory()
    trained.observe("x")
    with pytest.raises(AstraflowError, match=r"evals\.\*\.sampling") as caught:
        await trained.sample(**knobs)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.metadata["field"] == f"sampling.{next(iter(knobs))}"
    assert (await trained.sample(temperature=0.7, stop_strings=("b",))).text == "b"


async def test_a_trained_trajectory_has_one_temperature(parrot, episode):
    run = episode(solver=parrot("a", "b", "c"))
    port = replace(run.port("solver"), is_trained=True)
    talk = Episode(task=run.task, sample_index=0, policies={"solver": port}).trajectory()
    talk.observe("x")
    await talk.sample(temperature=0.5)
    await talk.sample()
    with pytest.raises(AstraflowError, match=r"temperature = 1\.0 after 0\.5"):
        await talk.sample(temperature=1.0)
