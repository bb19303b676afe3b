import asyncio
import math
from dataclasses import replace

import pytest

from astraflow.core.clock import ManualClock
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import Outcome
from astraflow.workflows.protocol import PolicyFault, Score
from astraflow.workflows.runner import run_episode


async def talk_once(episode):
    talk = episode.trajectory()
    talk.observe("x")
    await talk.sample()


async def test_a_score_becomes_a_rollout(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        return Score(reward=0.5, parts={"form": 0.5}, metrics={"turns": 1.0})

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")), clock=ManualClock())
    assert (rollout.outcome, rollout.reward) == (Outcome.SCORED, 0.5)
    assert (rollout.reward_parts, rollout.metrics) == ({"form": 0.5}, {"turns": 1.0})
    assert (rollout.rollout_id, rollout.group_id, rollout.sample_index) == ("t7/2", "g", 2)
    assert rollout.reward_code_digest == b"d"
    assert rollout.start_time == rollout.finish_time is not None


class SetClock(ManualClock):
    """Is set back by an hour while a second passes."""

    passed_s = 0.0

    def monotonic(self):
        return self.passed_s

    def step(self):
        self.advance(-3600)
        self.passed_s = 1.0


async def test_a_clock_that_is_set_changes_no_episodes_length(parrot, episode, loaded):
    clock = SetClock()

    async def run(one):
        await talk_once(one)
        clock.step()
        return 1

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")), clock=clock)
    assert (rollout.finish_time - rollout.start_time).total_seconds() == 1


async def test_a_bare_number_is_a_score(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        return 1

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.reward) == (Outcome.SCORED, 1.0)


async def test_a_cut_episode_keeps_its_score(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        return Score(reward=0.0, truncated=True)

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.reward, rollout.failure) == (Outcome.TRUNCATED, 0.0, None)


@pytest.mark.parametrize(
    ("error", "reason", "retryable"),
    [
        (ValueError("odd"), Reason.ENVIRONMENT_FAILED, True),
        (TimeoutError("its own"), Reason.ENVIRONMENT_FAILED, True),
        (AstraflowError(Reason.ENGINE_FAILED, "gone", retryable=True), Reason.ENGINE_FAILED, True),
        (AstraflowError(Reason.CONTEXT_TOO_LONG, "no room"), Reason.CONTEXT_TOO_LONG, False),
    ],
)
async def test_what_is_raised_before_a_token_is_no_reward(
    parrot, episode, loaded, error, reason, retryable
):
    async def run(one):
        raise error

    rollout = await run_episode(loaded(run), episode(solver=parrot()))
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert (rollout.failure.reason, rollout.failure.retryable) == (reason, retryable)
    assert rollout.trajectories == ()


async def test_a_task_of_its_own_that_was_cancelled_is_its_failure(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        own = asyncio.ensure_future(asyncio.sleep(60))
        own.cancel()
        await own

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.failure.reason) == (
        Outcome.INFRA_ERROR,
        Reason.ENVIRONMENT_FAILED,
    )
    assert "workflow w raised CancelledError" in rollout.failure.message


async def test_a_crash_names_the_workflow_and_the_error(parrot, episode, loaded):
    async def run(one):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def fail():
        raise KeyError("question")

    rollout = await run_episode(loaded(run), episode(solver=parrot()))
    assert rollout.failure.message == "workflow w raised KeyError: 'question'"


async def test_a_workflow_that_never_ends_times_out(parrot, episode, loaded):
    stuck = episode(solver=parrot(is_stuck=True), timeout_s=0.01)
    rollout = await run_episode(loaded(talk_once), stuck)
    assert rollout.outcome is Outcome.INFRA_ERROR
    assert rollout.failure.reason is Reason.ROLLOUT_TIMEOUT
    assert "0.01 s" in rollout.failure.message


async def test_a_failing_scorer_keeps_what_can_be_scored_again(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        raise AstraflowError(Reason.SCORER_FAILED, "no verdict")

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.reward) == (Outcome.SCORER_FAILED, None)
    assert len(rollout.trajectories) == 1


async def test_a_reward_that_is_not_a_number_is_the_scorers_failure(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        return math.nan

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert rollout.outcome is Outcome.SCORER_FAILED


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_trajectory_of_no_finite_reward_is_told_at_its_line(
    parrot, episode, loaded, reward
):
    async def run(one):
        talk = one.trajectory()
        talk.observe("x")
        await talk.sample()
        talk.reward = reward

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.failure.reason) == (Outcome.INFRA_ERROR, Reason.INVALID_FIELD)
    assert "talk.reward = reward" in rollout.failure.traceback


@pytest.mark.parametrize("error", [None, ValueError("odd"), PolicyFault("odd"), "scorer"])
async def test_what_an_engine_samples_unsoundly_costs_one_rollout(parrot, episode, loaded, error):
    engine = parrot("a")
    sample = engine.generate

    async def unsound(*arguments, **options):
        made = await sample(*arguments, **options)
        return replace(made, logprobs=made.logprobs[:0])

    engine.generate = unsound

    async def run(one):
        await talk_once(one)
        if error == "scorer":
            raise AstraflowError(Reason.SCORER_FAILED, "odd")
        if error is not None:
            raise error
        return 1.0

    rollout = await run_episode(loaded(run), episode(solver=engine))
    assert (rollout.outcome, rollout.trajectories) == (Outcome.INFRA_ERROR, ())
    assert rollout.failure.reason is Reason.ENGINE_FAILED


async def test_a_context_that_is_full_ends_the_episode(parrot, episode, loaded):
    async def run(one):
        talk = one.trajectory()
        talk.observe([9, 9])
        while True:
            await talk.sample()

    rollout = await run_episode(
        loaded(run), episode(solver=parrot("abcdef", max_context_token_count=5))
    )
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, None)


async def crashes(one):
    raise KeyError("question")  # crashes


async def waits(one):
    await asyncio.Event().wait()  # waits


async def samples_nothing(one):  # samples nothing
    return 1.0


async def returns_text(one):  # returns text
    await talk_once(one)
    return "well done"


@pytest.mark.parametrize(
    ("run", "cause", "line"),
    [
        (crashes, "KeyError", "# crashes"),
        (waits, "Timeout", "# waits"),
        (samples_nothing, "NothingSampled", "# samples nothing"),
        (returns_text, "str returned", "# returns text"),
    ],
)
async def test_a_failure_says_the_line_of_the_workflow(parrot, episode, loaded, run, cause, line):
    rollout = await run_episode(loaded(run), episode(solver=parrot("a"), timeout_s=0.05))
    assert rollout.failure.cause.startswith(f"{cause} at test_runner.py:")
    assert line in rollout.failure.traceback


async def test_a_message_is_bounded(parrot, episode, loaded):
    async def run(one):
        raise ValueError("x" * 10**6)

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert len(rollout.failure.message) < 1000
    assert len(rollout.failure.traceback) <= 4096


async def faulty(one):
    await talk_once(one)
    raise PolicyFault("its program took longer than 5 s", parts={"timeout": 1.0})


async def test_what_the_policy_broke_counts(parrot, episode, loaded):
    of_recipe = replace(loaded(faulty), policy_fault_reward=-0.5)
    rollout = await run_episode(of_recipe, episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.reward) == (Outcome.POLICY_FAULT, -0.5)
    assert rollout.reward_parts == {"timeout": 1.0}
    assert rollout.failure.reason is Reason.POLICY_FAULT
    assert rollout.failure.message == "its program took longer than 5 s"
    assert len(rollout.trajectories) == 1


async def test_a_fault_may_have_a_reward_of_its_own(parrot, episode, loaded):
    async def run(one):
        await talk_once(one)
        raise PolicyFault("no such tool", reward=0.25)

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.reward) == (Outcome.POLICY_FAULT, 0.25)


async def test_a_fault_of_what_was_not_sampled_is_a_failure(parrot, episode, loaded):
    async def run(one):
        raise PolicyFault("too early")

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert "before the policy sampled" in rollout.failure.message


async def test_an_exit_costs_one_rollout(parrot, episode, loaded):
    async def run(one):
        raise SystemExit(3)

    rollout = await run_episode(loaded(run), episode(solver=parrot("a")))
    assert rollout.outcome is Outcome.INFRA_ERROR
    assert "SystemExit: 3" in rollout.failure.message


async def test_sampling_nothing_is_a_failure(parrot, episode, loaded):
    async def run(one):
        return 1.0

    rollout = await run_episode(loaded(run), episode(solver=parrot()))
    assert rollout.failure.reason is Reason.ENVIRONMENT_FAILED


async def test_a_cancellation_goes_through(parrot, episode, loaded):
    stuck = episode(solver=parrot(is_stuck=True))
    task = asyncio.ensure_future(run_episode(loaded(talk_once), stuck))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
