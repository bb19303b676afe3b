"""Programs as agents: real processes that talk to a real endpoint."""

import asyncio
import os
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from astraflow.core.errors import AstraflowError, Reason
from astraflow.testing import CharTokenizer
from astraflow.workflows.agents.harnesses import HARNESSES
from astraflow.workflows.agents.session import SessionEndpoint
from astraflow.workflows.agents.workflows import Command
from astraflow.workflows.rewards.compare import Exact
from astraflow.workflows.scoring import GuardedScorer

ASKER = (sys.executable, "-I", "-S", str(Path(__file__).parent / "programs" / "asker.py"))


@pytest.fixture
def episode(served_episode):
    def make(prompt="hi", answer="abc"):
        return served_episode({"prompt": prompt, "answer": answer}, lambda text: "abc")

    return make


@pytest.fixture
async def command(door):
    """Make workflows; what they keep running ends before the door is closed."""
    made = []

    def make(*arguments, scorer=None, **options):
        options = Command.Options(command=(*ASKER, *arguments), **options)
        made.append(Command(options, scorer and GuardedScorer(scorer, name="exact")))
        return made[-1]

    yield make
    for each in made:
        await each.close()


@pytest.mark.slow
async def test_the_scorer_reads_the_last_reply_of_an_agent_that_reports_nothing(command, episode):
    run = episode()
    score = await command(scorer=Exact(Exact.Options())).run(run)
    (trajectory,) = run.trajectories()
    assert score.reward == 1.0
    assert CharTokenizer().decode(trajectory.tokens) == "hiabc"
    assert trajectory.sampled_mask.sum() == 3


@pytest.mark.slow
async def test_what_an_agent_reports_is_the_reward(command, episode):
    assert (await command("--reward").run(episode())).reward == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [0, 1])
async def test_a_budget_that_cuts_the_last_answer_is_seen_beside_a_reported_reward(
    command, served_episode, persistent
):
    workflow = command("--reward", persistent=persistent)
    for said, is_cut in (("abc", False), ("a" * 9, True)):
        run = served_episode({"prompt": "hi"}, lambda _, said=said: said, max_new_tokens=8)
        score = await workflow.run(run)
        assert (score.reward, score.truncated) == (min(8, len(said)), is_cut)


@pytest.mark.slow
async def test_an_agent_finds_the_policy_where_a_proxy_leads_outside(command, episode, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for persistent in (0, 1):
        agent = command("--reward", persistent=persistent)
        assert (await agent.run(episode())).reward == 3.0


@pytest.mark.slow
async def test_the_scorer_may_read_what_was_printed(command, episode):
    run = episode(answer="I say abc")
    scored = await command(scorer=Exact(Exact.Options()), answer="stdout").run(run)
    assert scored.reward == 1.0


@pytest.mark.slow
async def test_an_agent_that_fails_is_no_reward_of_zero(command, episode):
    with pytest.raises(AstraflowError, match="code 1: no such tool") as caught:
        await command("--crash", attempts=1).run(episode())
    assert caught.value.reason is Reason.ENVIRONMENT_FAILED
    run = episode()
    score = await command("--crash", infra_error="zero").run(run)
    assert (score.reward, dict(score.parts)) == (0.0, {"infra_error": 1.0})
    assert run.has_sampled


@pytest.mark.slow
async def test_an_agent_whose_context_is_full_is_told_so_and_nothing_failed(command, episode):
    with pytest.raises(AstraflowError) as caught:
        await command().run(episode("long " * 1000))
    assert caught.value.reason is Reason.CONTEXT_TOO_LONG


TWICE = """
import json, os
from urllib.request import Request, urlopen
for text in ("hi", os.environ["SECOND"]):
    asked = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", asked, head)).read()
"""


def no_scorer(prompt, text):
    raise KeyError(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "reason"),
    [("long " * 1000, Reason.CONTEXT_TOO_LONG), ("more", Reason.SCORER_FAILED)],
)
async def test_what_is_no_failure_of_an_agent_is_no_reward_of_zero(episode, second, reason):
    options = {"command": (sys.executable, "-c", TWICE), "env": {"SECOND": second}}
    workflow = Command(
        Command.Options(**options, infra_error="zero"), GuardedScorer(no_scorer, name="none")
    )
    with pytest.raises(AstraflowError) as caught:
        await workflow.run(episode())
    assert caught.value.reason is reason


@pytest.mark.slow
async def test_an_agent_that_hangs_is_out_of_time(episode):
    options = Command.Options(command=("sleep", "600"), time_s=0.2, attempts=2)
    with pytest.raises(AstraflowError, match=r"longer than 0\.2 s") as caught:
        await Command(options, None).run(episode())
    assert caught.value.reason is Reason.ROLLOUT_TIMEOUT


@pytest.mark.slow
async def test_without_reward_and_scorer_nothing_is_known(command, episode):
    with pytest.raises(AstraflowError, match="names no scorer"):
        await command().run(episode())


async def test_one_process_serves_many_episodes(command, episode):
    workflow = command(persistent=1)
    scores = await asyncio.gather(*(workflow.run(episode(str(number))) for number in range(3)))
    assert {score.reward for score in scores} == {3.0}
    assert len({score.parts["process"] for score in scores}) == 1


@pytest.mark.slow
async def test_a_process_that_dies_is_replaced(command, episode):
    workflow = command(persistent=1, attempts=1)
    first = await workflow.run(episode())
    with pytest.raises(AstraflowError, match="died"):
        await workflow.run(episode("die"))
    second = await workflow.run(episode())
    assert first.reward == second.reward


@pytest.mark.slow
async def test_a_process_is_not_handed_on_whose_end_was_not_awaited(command, episode):
    workflow = command(persistent=1, attempts=1)
    first = await workflow.run(episode())
    running = asyncio.ensure_future(workflow.run(episode("stay")))
    while not workflow._free.empty():  # noqa: ASYNC110 - other tasks make it true
        await asyncio.sleep(0)
    for _ in range(2):
        await asyncio.sleep(0)
        running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    second = await workflow.run(episode())
    assert first.parts["process"] != second.parts["process"]


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_finds_the_policy_and_nothing_of_it_is_left(name, tmp_path):
    entrance = SessionEndpoint(base_url="http://h:1/s/v1", session_url="http://h:1/s", key="sk-1")
    made = HARNESSES[name].prepare(entrance, model="p", folder=tmp_path)
    texts = [*made.values(), *(path.read_text() for path in tmp_path.rglob("*") if path.is_file())]
    assert not any(
        place in text for place in ("{key}", "{model}", "{folder}", "_url}") for text in texts
    )
    assert all(str(tmp_path) in text for text in texts if text.startswith("/"))


def test_a_codex_is_configured_in_the_folder_of_its_episode(tmp_path):
    entrance = SessionEndpoint(base_url="http://h:1/s/v1", session_url="http://h:1/s", key="sk-1")
    made = HARNESSES["codex"].prepare(entrance, model="p", folder=tmp_path)
    told = tomllib.loads(Path(made["CODEX_HOME"], "config.toml").read_text())
    provider = told["model_providers"][told["model_provider"]]
    assert (told["model"], provider["base_url"]) == ("p", "http://h:1/s/v1")


@pytest.mark.slow
async def test_a_harness_is_told_and_the_recipe_has_the_last_word(episode):
    words = ("bash", "-c", 'echo "$OPENAI_AGENTS_DISABLE_TRACING $OPENAI_DEFAULT_MODEL"')
    options = {"command": words, "harness": "openai-agents", "answer": "stdout"}
    for env, said in (({}, "1 solver"), ({"OPENAI_DEFAULT_MODEL": "mine"}, "1 mine")):
        run = episode(answer=said)
        scorer = GuardedScorer(Exact(Exact.Options()), name="exact")
        made = Command(Command.Options(**options, env=env), scorer)
        assert (await made.run(run)).reward == 1.0


@pytest.mark.slow
async def test_an_agent_may_work_in_the_folder_of_its_episode(episode):
    words = ("bash", "-c", 'cd "$(dirname "$ASTRAFLOW_TASK_FILE")" && touch made && pwd')
    folders = []
    scorer = GuardedScorer(lambda _, text: folders.append(Path(text)) or 1.0, name="seen")
    made = Command(Command.Options(command=words, answer="stdout"), scorer)
    await asyncio.gather(made.run(episode()), made.run(episode()))
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is locked to root")
async def test_an_agent_that_locks_its_folder_has_printed_nothing(episode):
    words = ("bash", "-c", 'echo abc; chmod 000 "$(dirname "$ASTRAFLOW_TASK_FILE")"')
    scorer = GuardedScorer(Exact(Exact.Options()), name="exact")
    made = Command(Command.Options(command=words, answer="stdout"), scorer)
    assert (await made.run(episode())).reward == 0.0


@pytest.mark.slow
async def test_folders_as_deep_as_an_agent_likes_are_removed(episode, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = "import os; os.chdir(os.path.dirname(os.environ['ASTRAFLOW_TASK_FILE']));"
    make += "[(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]; print('abc')"
    options = Command.Options(command=(sys.executable, "-c", make), answer="stdout")
    scorer = GuardedScorer(Exact(Exact.Options()), name="exact")
    assert (await Command(options, scorer).run(episode())).reward == 1.0
    assert not list(tmp_path.glob("astraflow-agent-*"))


def test_a_harness_that_is_unknown_is_named_with_the_nearest():
    with pytest.raises(ValidationError, match="did you mean 'codex'"):
        Command.Options(command=("x",), harness="codx")
    with pytest.raises(ValidationError, match="started for each episode"):
        Command.Options(command=("x",), harness="codex", persistent=1)


def test_it_says_what_is_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()

    def lacks(*words, **options):
        return [*Command(Command.Options(command=words, **options), None).lacks()]

    assert lacks(sys.executable, "-S", "agent.py") == []
    assert "no script.py in the working directory" in lacks(sys.executable, "script.py")[0]
    assert "no program no-such-agent" in lacks("no-such-agent")[0]
    assert "no program true" in lacks("true", env={"PATH": str(tmp_path)})[0]
