"""The workflow `environment`: a policy acts in real environments, in processes of their own."""

from dataclasses import replace

import psutil
import pytest
from pydantic import ValidationError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import FinishReason, Outcome
from astraflow.core.tasks import Prompt
from astraflow.testing import small_recipe, start_run
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.environments.workflow import EnvironmentWorkflow, action_finder, seed_of
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.runner import run_episode
from astraflow.workflows.scoring import GuardedScorer


@pytest.fixture
async def play(parrot, episode, loaded):
    """Run one episode in which the policy says what it is told to."""
    made = []

    async def run(*script, world="Countdown", fields=None, context=400, **options):
        given = {"environment": f"worlds:{world}", "workers": 1, **options}
        workflow = EnvironmentWorkflow(EnvironmentWorkflow.Options(**given), None)
        made.append(workflow)
        policy = parrot(*script, max_context_token_count=context)
        run = episode(fields={"seed": 1} if fields is None else fields, solver=policy)
        return await run_episode(loaded(workflow), run)

    yield run
    for workflow in made:
        await workflow.close()


def texts(rollout):
    """Return what was told and what was said, in order, as one text each."""
    (made,) = rollout.trajectories
    pairs = zip(made.tokens, made.sampled_mask, strict=True)
    letters = [(chr(token), sampled) for token, sampled in pairs]
    told = "".join(letter for letter, sampled in letters if not sampled and ord(letter) > 3)
    said = "".join(letter for letter, sampled in letters if sampled and ord(letter) > 3)
    return told, said


async def test_the_reward_is_the_sum_of_the_steps(play):
    rollout = await play("3", "2", "1")
    assert rollout.outcome is Outcome.SCORED
    assert rollout.reward == pytest.approx(1.0)
    assert rollout.metrics == {"left": 0.0, "turns": 3.0, "unparsable": 0.0, "solved": 1.0}
    assert rollout.trajectories[0].finish_reason is FinishReason.STOP


async def test_what_the_environment_says_is_masked(play):
    rollout = await play("3", "8", "2", max_turns=3)
    assert texts(rollout) == ("from 3go onnot 8", "382")


async def test_turns_end_an_episode_that_never_ends(play):
    rollout = await play("x", "x", max_turns=2)
    assert (rollout.reward, rollout.outcome) == (0.0, Outcome.SCORED)
    assert rollout.metrics["turns"] == 2.0
    assert rollout.trajectories[0].finish_reason is FinishReason.TURNS


async def test_the_last_reward_can_be_the_one_that_counts(play):
    rollout = await play("3", "x", max_turns=2, reward="last")
    assert rollout.reward == 0.0


async def test_who_gives_no_action_hears_of_it(play):
    rollout = await play("hm", "<a>3</a>", action="tag:a", max_turns=2)
    assert "between <a> and </a>" in texts(rollout)[0]
    assert rollout.metrics["unparsable"] == 1.0
    assert rollout.reward == pytest.approx(1 / 3)
    rollout = await play("hm", "3", action="regex:[0-9]", unparsable="?!", max_turns=2)
    assert texts(rollout)[0] == "from 3?!"


async def test_who_gives_no_action_may_end_there(play):
    rollout = await play("3", "hm", action="regex:[0-9]", on_unparsable="end")
    assert rollout.reward == pytest.approx(1 / 3)
    assert rollout.metrics["turns"] == 2.0
    assert (rollout.outcome, rollout.trajectories[0].finish_reason) == (
        Outcome.SCORED,
        FinishReason.STOP,
    )
    rollout = await play("3", "hm" * 9, action="regex:[0-9]", on_unparsable="end")
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, pytest.approx(1 / 3))


async def test_the_chat_begins_as_the_recipe_says(play):
    rollout = await play(
        "3",
        max_turns=1,
        system="[Count.]",
        examples=[{"role": "user", "content": "[9]"}, {"role": "assistant", "content": "[ok]"}],
        observation="{observation} {in braces}: ",
    )
    assert texts(rollout)[0] == "[Count.][9][ok]from 3 {in braces}: "


async def test_plain_text_needs_no_template(parrot, episode, loaded):
    options = {"environment": "worlds:Countdown", "workers": 1, "max_turns": 2, "chat": False}
    workflow = EnvironmentWorkflow(EnvironmentWorkflow.Options(**options, system="[s]"), None)
    run = episode(fields={}, solver=parrot("3", "2", max_context_token_count=99))
    (port,) = run._policies.values()
    run._policies = {port.policy_id: replace(port, template=ChatTemplate("no {{ messages }}"))}
    rollout = await run_episode(loaded(workflow), run)
    await workflow.close()
    assert texts(rollout) == ("[s]from 3go on", "32")


async def test_the_template_shows_tools(parrot, episode, loaded):
    tools = [{"type": "function", "function": {"name": "look"}}]
    options = {"environment": "worlds:Countdown", "workers": 1, "max_turns": 2, "tools": tools}
    workflow = EnvironmentWorkflow(EnvironmentWorkflow.Options(**options), None)
    run = episode(fields={}, solver=parrot("3", "2", max_context_token_count=99))
    (port,) = run._policies.values()
    template = ChatTemplate(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    run._policies = {port.policy_id: replace(port, template=template)}
    rollout = await run_episode(loaded(workflow), run)
    await workflow.close()
    told, said = texts(rollout)
    assert '"name": "look"' in told
    assert told.count("look") == 1
    assert (told[-11:], said) == ("from 3go on", "32")


async def test_an_environment_may_speak_in_messages(play):
    rollout = await play("a", "b", world="Talk", max_turns=2)
    assert texts(rollout)[0] == "[s][u][again]"


async def test_a_full_context_ends_an_episode_with_what_was_reached(play):
    # "from 3" and the start, "3" and the end, "go on", "2" and the end: no room for another.
    rollout = await play("3", "2", "1", context=16)
    assert rollout.outcome is Outcome.TRUNCATED
    assert rollout.reward == pytest.approx(2 / 3)


async def test_an_environment_that_fails_is_no_reward_of_zero(play):
    rollout = await play("3", "raise", world="Moody")
    assert (rollout.outcome, rollout.reward) == (Outcome.INFRA_ERROR, None)
    assert rollout.failure.reason is Reason.ENVIRONMENT_FAILED
    assert "the dragon is tired" in rollout.failure.message


@pytest.mark.parametrize(
    ("how", "text", "action"),
    [
        ("text", " go east \n", "go east"),
        ("text", " \n", None),
        ("last_line", "I think.\ngo east\n\n", "go east"),
        ("last_line", "", None),
        ("tag:act", "<act>a</act> no: <act> go\neast </act>", "go\neast"),
        ("tag:act", "<act>a", None),
        ("tag:act", "<act> \n </act>", None),
        # An hour, were it more than a look at each letter.
        pytest.param("tag:act", "<act>" + " " * 10_000, None, id="spaces without end"),
        ("tag:act", "In <act> I say what I do: <act>go</act>", "go"),
        ("regex:[0-9]+", "3 + 4 = 7", "7"),
        (r"regex:\[(\w+)\]", "[up] or [down]", "down"),
        ("regex:x", "y", None),
    ],
)
def test_actions_are_found(how, text, action):
    assert action_finder(how)(text) == action


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"action": "tag"}, "'tag' is none of text, last_line, tag:NAME, regex:PATTERN"),
        ({"action": "regex:("}, "no regular expression"),
        ({"observation": "hello"}, r"put \{observation\} into it"),
        ({"tools": [{"type": "function"}], "chat": False}, "tell of them in text"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(ValidationError, match=said):
        EnvironmentWorkflow.Options(environment="worlds:Countdown", **options)


def test_a_scorer_is_refused():
    scorer = GuardedScorer(Exact(Exact.Options()), name="exact")
    with pytest.raises(AstraflowError, match="leave the scorer out"):
        EnvironmentWorkflow(EnvironmentWorkflow.Options(environment="textarena"), scorer)


def test_the_rollouts_of_a_prompt_have_one_seed():
    def prompt(**fields):
        return Prompt(prompt_id="train/7", data_set="train", fields=fields)

    assert seed_of(prompt(seed=12)) == 12
    assert seed_of(prompt()) == seed_of(prompt(game="x")) >= 0
    for seed in ("one", -1, 0.5, float("nan"), float("inf")):
        with pytest.raises(AstraflowError, match="no whole number"):
            seed_of(prompt(seed=seed))


async def test_a_run_is_trained_on_an_environment_from_its_recipe_alone(tmp_path):
    recipe = small_recipe(
        tmp_path,
        workflow="environment",
        changes={
            "data.train": {"seeds": [0, 16]},
            "workflows.main.options": {
                "environment": "worlds:Countdown",
                "environment_options": {"start": 1},
                "action": "regex:[0-9]",
            },
        },
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=lambda text: "it is 1")
        run.add_trainer()
        await run.finish()
    rollouts = [each.rollout for each in run.rollouts()]
    assert {each.reward for each in rollouts} == {1.0}
    assert {each.metrics["solved"] for each in rollouts} == {1.0}
    # The node has stopped the processes of its environments.
    children = psutil.Process().children(recursive=True)
    assert not [each for each in children if "worlds:Countdown" in each.cmdline()]
