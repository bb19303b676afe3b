import importlib.util
import textwrap

import pytest
import yaml

from astraflow.config.recipe import Recipe
from astraflow.core.tasks import Prompt, RolloutTask, SamplingParams, TaskPurpose
from astraflow.testing import CharTokenizer, SmallEngine
from astraflow.workflows.building import parse_options
from astraflow.workflows.episode import Episode
from astraflow.workflows.ports import PolicyPort
from astraflow.workflows.single_turn import SingleTurn
from astraflow.workflows.solver_verifier import SolverVerifier


@pytest.mark.slow
def test_the_workflow_that_is_shown_runs_to_accepted_rollouts(run_example):
    assert "1 passed" in run_example("workflows.md")


def test_a_workflow_takes_twenty_lines(blocks):
    [code] = [code for _, title, code in blocks("workflows.md") if title == "my_workflows.py"]
    lines = [line for line in code.splitlines() if line.strip() and "import " not in line]
    assert len(lines) <= 20


def test_the_scorer_that_is_shown_scores(blocks, tmp_path):
    [code] = [code for _, title, code in blocks("scorers.md") if title == "my_scorers.py"]
    (tmp_path / "my_scorers.py").write_text(code)
    spec = importlib.util.spec_from_file_location("my_scorers", tmp_path / "my_scorers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompt = Prompt(prompt_id="1", data_set="train", fields={"answer": "4"})
    assert module.brief(prompt, "4").parts == {"right": 1.0}


def shown(blocks):
    both = [*blocks("workflows.md"), *blocks("scorers.md")]
    return [yaml.safe_load(code) for kind, _, code in both if kind == "yaml"]


def test_the_keys_of_a_workflow_are_those_of_a_recipe(blocks):
    fields = Recipe.model_fields["workflows"].annotation.__args__[1].model_fields
    workflows = [each["workflows"] for each in shown(blocks) if "workflows" in each]
    assert {name for each in workflows for name in each} == {"retry", "pair"}
    assert all(made.keys() <= fields.keys() for each in workflows for made in each.values())


def test_the_options_of_built_in_workflows_are_read(blocks):
    examples = shown(blocks)
    [prompt] = [each["options"] for each in examples if "options" in each]
    assert len(parse_options(SingleTurn, prompt, where="docs").messages) == 3
    [pair] = [each["workflows"]["pair"] for each in examples if "pair" in each.get("workflows", {})]
    options = parse_options(SolverVerifier, pair["options"], where="docs")
    assert options.messages[0].content.endswith("put the answer into \\boxed{}.")
    assert options.verdict == "tag"


async def test_the_chat_that_is_shown_can_be_had(blocks):
    shown = [code for _, title, code in blocks("workflows.md") if not title]
    [code] = [code for code in shown if "talk.chat([" in code]
    engine = SmallEngine(answer=lambda told: "7" if told.endswith("3 + 4?") else "14")
    engine.version = 0
    port = PolicyPort(
        policy_id="solver",
        engine=engine,
        tokenizer=CharTokenizer(),
        sampling=SamplingParams(max_new_tokens=8),
    )
    task = RolloutTask(
        task_id="t",
        group_id="g",
        purpose=TaskPurpose.TRAIN,
        workflow_id="w",
        prompt=Prompt(prompt_id="1", data_set="train", fields={}),
        sample_indexes=(0,),
        versions={},
        sampling={},
    )
    episode = Episode(task=task, sample_index=0, policies={"solver": port})
    body = "async def play(episode):\n" + textwrap.indent(code, "    ") + "    return reply.text"
    found = {}
    exec(body, found)
    assert await found["play"](episode) == "14"
