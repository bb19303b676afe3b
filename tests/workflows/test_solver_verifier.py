import math

import numpy as np
import pytest
from pydantic import ValidationError

from astraflow.core.rollouts import FinishReason, Outcome
from astraflow.workflows.ports import Reply
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.runner import run_episode
from astraflow.workflows.scoring import GuardedScorer
from astraflow.workflows.solver_verifier import (
    PairOptions,
    SolverVerifier,
    SolverVerifierPair,
    probability_of,
)

SCORER = GuardedScorer(Exact(Exact.Options()), name="exact")
ONE_TOKEN = {
    "verify": {"text": "{prompt}{answer}?"},
    "approve": "y",
    "reject": "n",
    "verdict_tokens": 1,
    "feedback": "[{verdict}]",
}


def pair(**options):
    return SolverVerifier(SolverVerifier.Options.model_validate(ONE_TOKEN | options), SCORER)


@pytest.mark.parametrize(
    ("answer", "verdict", "rewards"),
    [
        *(("abc", "y", (1, 1)), ("abc", "n", (1, 0)), ("cba", "y", (0, 0)), ("cba", "n", (0, 1))),
        # Neither word: nothing was said that could be true.
        *(("abc", "x", (1, 0)), ("cba", "x", (0, 0))),
    ],
)
async def test_each_is_rewarded_for_its_own_work(parrot, episode, loaded, answer, verdict, rewards):
    rollout = await run_episode(
        loaded(pair()), episode(solver=parrot(answer), verifier=parrot(verdict))
    )
    assert rollout.outcome is Outcome.SCORED
    assert rollout.reward == rewards[0]
    by_policy = {part.policy_id: part.reward for part in rollout.trajectories}
    assert by_policy == {"solver": rewards[0], "verifier": rewards[1]}
    assert rollout.metrics["verdict_right"] == rewards[1]
    assert rollout.metrics["parsed"] == float(verdict != "x")


async def test_the_verifier_sees_the_prompt_and_the_answer(parrot, episode, loaded):
    judge = parrot("y")
    await run_episode(loaded(pair()), episode(solver=parrot("ab"), verifier=judge))
    tokens, sampling, _ = judge.asked[0]
    # Not the row's own field of that name, which is abc.
    assert tokens[1:] == list(map(ord, "cab>ab?"))
    assert sampling.max_new_tokens == 1


async def test_the_default_question_is_a_chat_with_the_attempt(parrot, episode, loaded):
    judge = parrot("APPROVE", max_context_token_count=999)
    workflow = SolverVerifier(SolverVerifier.Options(), SCORER)
    rollout = await run_episode(loaded(workflow), episode(solver=parrot("abc"), verifier=judge))
    asked = "".join(map(chr, judge.asked[0][0][1:]))
    assert asked.startswith("cab>\n\nA proposed solution:\n\nabc\n\nCheck each step")
    assert (rollout.reward, rollout.metrics["approved"]) == (1.0, 1.0)


async def test_a_rejected_solver_reads_why_and_tries_again(parrot, episode, loaded):
    solver, judge = parrot("cba", "bac", "abc"), parrot("n", "n", "y")
    workflow = pair(max_rounds=5)
    rollout = await run_episode(loaded(workflow), episode(solver=solver, verifier=judge))
    # The solver's chat has all that it said before, as it was sampled.
    assert solver.asked[2][0] == [
        2,
        *map(ord, "cab>cba"),
        3,
        *map(ord, "[n]bac"),
        3,
        *map(ord, "[n]"),
    ]
    assert [
        (each.agent, each.reward, int(each.sampled_mask.sum())) for each in rollout.trajectories
    ] == [
        *(("solver", 0.0, 4), ("verifier", 1.0, 1)),
        *(("solver/2", 0.0, 4), ("verifier/2", 1.0, 1)),
        *(("solver/3", 1.0, 4), ("verifier/3", 1.0, 1)),
    ]
    assert rollout.reward == 1.0
    assert rollout.metrics == {
        "rounds": 3.0, "first_try": 0.0, "solved": 1.0, "verdict_right": 1.0,
        "approved": pytest.approx(1 / 3), "parsed": 1.0,
    }  # fmt: skip


async def test_rounds_end_when_they_are_used_up_or_an_attempt_is_approved(parrot, episode, loaded):
    def run(verdicts, **options):
        play = episode(solver=parrot(*["cba"] * 9), verifier=parrot(*verdicts))
        return run_episode(loaded(pair(**options)), play)

    assert (await run("nnn", max_rounds=2)).metrics["rounds"] == 2
    approved = await run("ynn", max_rounds=2)
    assert (approved.metrics["rounds"], approved.metrics["verdict_right"]) == (1, 0)
    assert (await run("xxx", max_rounds=3)).metrics["rounds"] == 3
    assert (await run("xxx", max_rounds=3, unparsed="approve")).metrics["rounds"] == 1


async def test_a_retry_that_has_no_room_leaves_the_last_attempt(parrot, episode, loaded):
    solver = parrot("cba", max_context_token_count=12)
    rollout = await run_episode(
        loaded(pair(max_rounds=2)), episode(solver=solver, verifier=parrot("n"))
    )
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 0.0)
    assert [each.agent for each in rollout.trajectories] == ["solver", "verifier"]
    assert [each.reward for each in rollout.trajectories] == [0.0, 1.0]


async def test_an_attempt_that_no_verifier_can_read_has_its_reward(parrot, episode, loaded):
    judge = parrot(max_context_token_count=5)
    rollout = await run_episode(loaded(pair()), episode(solver=parrot("abc"), verifier=judge))
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 1.0)
    assert [each.agent for each in rollout.trajectories] == ["solver"]
    assert rollout.metrics["parsed"] == 0.0


@pytest.mark.parametrize(
    ("where", "text", "verdict"),
    [
        ("word", "I would approve it, but: REJECT.", False),
        ("word", "<verify>reject</verify> no: <verify>Approve</verify>", True),
        ("word", "I disapprove of that; rejected", None),
        ("word", "", None),
        ("tag", "APPROVE <verify> reject </verify>", False),
        ("tag", "APPROVE", None),
        ("boxed", r"REJECT \boxed{APPROVE}", True),
        ("boxed", r"\boxed{\text{reject}}", False),
        ("boxed", r"\boxed{4}", None),
    ],
)
def test_the_last_verdict_counts(where, text, verdict):
    assert SolverVerifierPair(PairOptions(verdict=where), SCORER).verdict_of(text) is verdict


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"verify": {"system": "Judge."}}, "needs 'messages' or 'text'"),
        ({"approve": "ok", "reject": "OK"}, "same word"),
    ],
)
def test_options_that_ask_for_nothing_are_refused(options, problem):
    with pytest.raises(ValidationError, match=problem):
        PairOptions.model_validate(options)


def said(*logprobs):
    return Reply(
        text="",
        tokens=np.zeros(len(logprobs), np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish_reason=FinishReason.LENGTH,
    )


def test_the_probability_of_a_verdict_of_one_token_is_that_of_the_token():
    assert probability_of(said(math.log(0.8)), is_approved=True) == pytest.approx(0.8)
    assert probability_of(said(math.log(0.8)), is_approved=False) == pytest.approx(0.2)


def test_a_reasoned_verdict_is_taken_at_its_word():
    assert probability_of(said(-0.1, -0.1), is_approved=True) == 1.0
    assert probability_of(said(), is_approved=False) == 0.0
