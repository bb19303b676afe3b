"""Frameworks and harnesses of others, as they are: what they sample is trained on as it was drawn.

scripts/install_frameworks.sh DIR
ASTRAFLOW_FRAMEWORKS=DIR pytest -m frameworks
"""

import json
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from astraflow.config.pool import Agents, EngineSettings
from astraflow.core.tasks import SamplingParams
from astraflow.engines.embedded import EmbeddedEngine
from astraflow.engines.tokenizer import load_tokenizer
from astraflow.raas.agents.endpoint import AgentEndpoint
from astraflow.testing import CharTokenizer, small_recipe, start_run
from astraflow.workflows.agents.template import ChatTemplate
from astraflow.workflows.agents.workflows import Command
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.scoring import GuardedScorer
from made_up import made_up_task

HERE = Path(__file__).parent / "frameworks"
ROOT = Path(os.environ.get("ASTRAFLOW_FRAMEWORKS", "/nowhere"))
MAX_CONTEXT = 100_000

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(not ROOT.is_dir(), reason="ASTRAFLOW_FRAMEWORKS is not set"),
    pytest.mark.timeout(240),
]


def call(tool, **arguments):
    """Return how the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def behind_mark(tool, **arguments):
    """Return the same without the mark that begins a call."""
    return call(tool, **arguments).removeprefix("<tool_call>\n")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an agent does, and what the model says to it.

    Attributes:
        command: Below ROOT, and its arguments.
        harness: Its name in a recipe.
        script: By a text that the beginning of a chat has, what is said in it.
        after: By a token that a request makes the answer begin with, what is said behind it.
        shows: Has to be printed.
        trajectories: That come of it; None: it is drawn how many.
        made: Text of the file `made.txt` that a tool was called to write.
    """

    command: tuple[str, ...]
    harness: str
    script: dict[str, list[str]]
    shows: str
    trajectories: int | None = 1
    after: dict[str, list[str]] = field(default_factory=dict)
    made: str = ""
    env: dict[str, str] = field(default_factory=dict)
    agents: Agents = field(default_factory=Agents)


def python(harness, does, script, shows, trajectories=1, **more):
    """Return a case of a script beside this one."""
    name = f"use_{harness.replace('-', '_')}.py"
    return Case(
        command=("python/bin/python", str(HERE / name), does),
        harness=harness,
        script={"": script} if isinstance(script, list) else script,
        shows=shows,
        trajectories=trajectories,
        **more,
    )


WEATHER = [call("get_weather", city="Tokyo"), "It is sunny."]
BOTH = call("get_weather", city="Tokyo") + "\n" + call("get_weather", city="Rome")
PRODUCT = ["Let me see. " + call("multiply", a=6, b=7), "It is 42."]
# smolagents write into what the policy said, so each call begins a trajectory; some ask for
# a call of any tool, whose first words a grammar says.
DURATION = [
    behind_mark("get_travel_duration", start="Paris", end="London"),
    behind_mark("final_answer", answer="2 hours"),
]
PLACES = [call("get_current_weather", location=place) for place in ("San Francisco", "Tokyo")]
CODE = (
    "Thought: I ask.\n<code>\nprint(get_travel_duration('Paris', 'London'))\n</code>",
    "Thought: I know.\n<code>\nfinal_answer('2 hours')\n</code>",
)
SHELL = "echo hi > made.txt"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
KEYS = {
    "analysis": "Nothing is there.",
    "plan": "Write it.",
    "commands": [{"keystrokes": "echo hi > made.txt\n", "duration": 0.1}],
}

CASES = {
    "openai-agents: chat": python("openai-agents", "chat", ["Calls call calls."], "Calls call"),
    "openai-agents: tool": python("openai-agents", "tool", WEATHER, "sunny."),
    "openai-agents: parallel tools": python(
        "openai-agents", "parallel_tools", [BOTH, "Both are sunny."], "Both are"
    ),
    "openai-agents: several turns": python(
        "openai-agents", "several_turns", ["San Francisco", "California"], "cisco California"
    ),
    "openai-agents: streamed": python("openai-agents", "streamed", WEATHER, "It is sunny."),
    "openai-agents: structured output": python(
        "openai-agents", "structured_output", ['{"name": "party", "day": 7}'], "day=7"
    ),
    "openai-agents: handoff": python(
        "openai-agents",
        "handoff",
        {"only speak": ["Muy bien."], "": [call("transfer_to_spanish_agent")]},
        "Spanish agent Muy bien.",
        2,
    ),
    "openai-agents: agents as tools": python(
        "openai-agents",
        "agents_as_tools",
        {"You translate": ["hola"], "": [call("to_spanish", input="hello"), "It is hola."]},
        "It is hola.",
        2,
    ),
    "openai-agents: chat completions": python("openai-agents", "chat_completions", WEATHER, "is s"),
    "langgraph: tools": python("langgraph", "tools", PRODUCT, "42."),
    "langgraph: responses api": python("langgraph", "responses_api", PRODUCT, "42."),
    "langgraph: streamed": python("langgraph", "streamed", PRODUCT, "It is 42."),
    "langgraph: structured output": python(
        "langgraph",
        "structured_output",
        ['{"setup": "What do cats say?", "punchline": "Me, how?"}'],
        "punchline='Me, how?'",
    ),
    "langgraph: sub-agents": python(
        "langgraph",
        "sub_agents",
        {"You write": ["Forty-two it is."], "": PRODUCT},
        "Forty-two",
        2,
    ),
    "smolagents: any tool": python(
        "smolagents", "any_tool", [], "2 hours", None, after={"\n": DURATION}
    ),
    "smolagents: one tool": python(
        "smolagents",
        "one_tool",
        [],
        "2 hours",
        after={" ": ['{"answer": "2 hours"}}\n</tool_call>']},
    ),
    "smolagents: code": python("smolagents", "code", list(CODE), "2 hours", 2),
    "smolagents: streamed": python(
        "smolagents", "streamed", [], "2 hours", None, after={"\n": DURATION}
    ),
    "smolagents: managed agents": python(
        "smolagents",
        "managed_agents",
        {
            "named 'traveller'": [CODE[0], "<code>\nfinal_answer('It takes 2 hours')\n</code>"],
            "": [
                "<code>\nprint(traveller(task='How long?'))\n</code>",
                "<code>\nfinal_answer('Go for 2 h')\n</code>",
            ],
        },
        "Go for 2 h",
        4,
    ),
    "litellm: several turns": python("litellm", "several_turns", ["a b", "c d", "e f"], "e f"),
    "litellm: parallel tools": python(
        "litellm", "parallel_tools", ["".join(PLACES), "It is 10 degrees."], "2 It is 10"
    ),
    "litellm: anthropic tools": python(
        "litellm", "anthropic_tools", ["I look." + "".join(PLACES), "It is 10."], "2 It is 10"
    ),
    "litellm: streamed": python(
        "litellm", "streamed", ["Hello to you."], "Hello to you.\nHello to you.", 2
    ),
    "litellm: structured output": python(
        "litellm", "structured_output", ['{"name": "Ada"}'], "{'name': 'Ada'}"
    ),
    "litellm: retried": python(
        "litellm", "retried", ["Hello."], "{'Hello.'}", 6, agents=Agents(max_requests=1)
    ),
    "mini-swe-agent: bash": Case(
        command=("python/bin/mini", "-y", "--exit-immediately", "-t", "Write hi to made.txt"),
        harness="mini-swe-agent",
        script={"": ["I do. " + call("bash", command=SHELL), call("bash", command=SUBMIT)]},
        shows="",
        made="hi",
    ),
    "terminus: tmux": Case(
        command=("terminus/bin/python", str(HERE / "use_terminus.py")),
        harness="terminus",
        script={
            "": [
                json.dumps(KEYS),
                *[json.dumps({**KEYS, "commands": [], "task_complete": True})] * 2,
            ]
        },
        shows="hi",
    ),
    "codex: exec": Case(
        command=(
            *("node/node_modules/.bin/codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "Write hi to made.txt"),
        ),
        harness="codex",
        script={"": [call("exec_command", cmd=SHELL), "It is done."]},
        shows="It is done.",
        made="hi",
    ),
    "claude-code: print": Case(
        command=(
            *("node/node_modules/.bin/claude", "-p", "Write hi to made.txt"),
            "--dangerously-skip-permissions",
        ),
        harness="claude-code",
        env={"IS_SANDBOX": "1"},
        script={"": ["I do." + call("Bash", command=SHELL, description="w"), "It is done."]},
        shows="It is done.",
        made="hi",
    ),
    "claude-code: sub-agent": Case(
        command=("node/node_modules/.bin/claude", "-p", "How many are there?"),
        harness="claude-code",
        script={
            "Count the files": ["There are 3."],
            "": [
                "I ask. "
                + call(
                    "Agent",
                    description="Counts",
                    prompt="Count the files",
                    subagent_type="general-purpose",
                    run_in_background=False,
                ),
                "It says that there are 3.",
            ],
        },
        shows="It says that there are 3.",
        trajectories=2,
    ),
    "claude-code: parallel tools": Case(
        command=(
            *("node/node_modules/.bin/claude", "-p", "--output-format", "stream-json"),
            *("--verbose", "--include-partial-messages", "--allowedTools", "Bash"),
            *("--", "Write hi to made.txt"),
        ),
        harness="claude-code",
        script={
            "": [
                call("Bash", command=SHELL, description="w")
                + "\n"
                + call("Bash", command="echo more", description="m"),
                "It is done.",
            ]
        },
        shows="It is done.",
        made="hi",
    ),
    "codex: sub-agent": Case(
        command=(
            *("node/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--json"),
            *("--dangerously-bypass-approvals-and-sandbox", "How many are there?"),
        ),
        harness="codex",
        script={
            "Count the files": ["There are 3."],
            "": [call("multi_agent_v1.spawn_agent", message="Count the files"), "I asked."],
        },
        shows="I asked.",
        trajectories=None,
    ),
    "opencode: sub-agent": Case(
        command=("node/node_modules/.bin/opencode", "run", "How many are there?"),
        harness="opencode",
        script={
            "title": ["Counting"],
            "Count the files": ["There are 3."],
            "": [
                call(
                    "task",
                    description="Counts",
                    prompt="Count the files",
                    subagent_type="general",
                ),
                "It says that there are 3.",
            ],
        },
        shows="It says that there are 3.",
        trajectories=3,
    ),
    "opencode: run": Case(
        command=("node/node_modules/.bin/opencode", "run", "Write hi to made.txt"),
        harness="opencode",
        script={
            "title": ["Writing hi"],
            "": [call("bash", command=SHELL, description="w"), "It is done."],
        },
        shows="It is done.",
        trajectories=2,
        made="hi",
    ),
}


@pytest.fixture
def stage(tmp_path):
    @asynccontextmanager
    async def make(case):
        from agent_speaker import TEMPLATE, Speaker, Tape  # noqa: PLC0415 - takes seconds of CPU

        folder = tmp_path / "model"
        speaker = Speaker.of(case.script, after=case.after)
        speaker.write(folder, max_context=MAX_CONTEXT)
        settings = EngineSettings(max_batch=8, max_context=MAX_CONTEXT)
        engine = EmbeddedEngine.from_directory(folder, settings, "policy")
        await engine.load_directory(0)
        sampling = SamplingParams(max_new_tokens=512, seed=5)
        tape = Tape(engine, is_renewed=True)
        port = PolicyPort(
            policy_id="policy",
            engine=tape,
            tokenizer=load_tokenizer(folder),
            sampling=sampling,
            template=ChatTemplate(TEMPLATE, variables=speaker.variables),
            is_trained=True,
        )
        task = made_up_task(sampling={"policy": sampling})
        endpoint = AgentEndpoint(case.agents)
        try:
            yield (
                Episode(
                    task=task, sample_index=0, policies={"policy": port}, agent_server=endpoint
                ),
                tape,
            )
        finally:
            await endpoint.close()
            await engine.close()

    return make


@pytest.mark.parametrize("name", CASES)
async def test_what_it_samples_is_trained_on_as_it_was_drawn(name, stage, tmp_path, monkeypatch):
    from agent_speaker import differences  # noqa: PLC0415 - takes seconds of CPU

    case, printed = CASES[name], []
    program, *arguments = case.command
    if not (ROOT / program).exists():
        pytest.skip(f"{program} was not installed")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    options = Command.Options(
        command=(str(ROOT / program), *arguments),
        harness=case.harness,
        env={"HOME": str(tmp_path), "PWD": str(work), **case.env},
        answer="stdout",
        memory_mb=4096,
        attempts=1,
    )
    scorer = GuardedScorer(lambda _, text: printed.append(text) or 1.0, name="printed")
    async with stage(case) as (episode, tape):
        await Command(options, scorer).run(episode)
        trajectories = episode.trajectories()
    assert differences(tape.calls, trajectories) == []
    assert case.shows in printed[0]
    assert len(trajectories) == (case.trajectories or len(trajectories)) > 0
    if case.made:
        assert (work / "made.txt").read_text().strip() == case.made


async def test_a_run_is_trained_through_a_framework(tmp_path):
    options = {
        "command": [str(ROOT / "python/bin/python"), str(HERE / "use_openai_agents.py"), "tool"],
        "harness": "openai-agents",
    }
    recipe = small_recipe(
        tmp_path,
        workflow="command",
        scorer="exact",
        prompts=[{"prompt": str(number), "answer": WEATHER[1]} for number in range(5)],
        changes={
            "workflows.main.options": options,
            "policies.solver.sampling.max_new_tokens": 128,
            "policies.solver.trainer.step_count": 1,
        },
    )
    async with start_run(recipe, run_dir=tmp_path / "run") as run:
        await run.add_node(answer=lambda text: WEATHER["is sunny" in text])
        run.add_trainer()
        await run.finish()
    rollouts = [each.rollout for each in run.rollouts()]
    assert {each.reward for each in rollouts} == {1.0}
    for (trajectory,) in (each.trajectories for each in rollouts):
        sampled = trajectory.tokens[trajectory.sampled_mask]
        assert CharTokenizer().decode(sampled) == "".join(WEATHER)
