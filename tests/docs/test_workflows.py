import importlib.util

import pytest
import yaml

from astraflow.config.recipe import Recipe
from astraflow.core.tasks import Prompt


@pytest.mark.slow
def test_the_workflow_that_is_shown_runs_to_accepted_rollouts(run_example):
    assert "1 passed" in run_example("workflows.md")


def test_a_workflow_takes_twenty_lines(blocks):
    [code] = [code for _, title, code in blocks("workflows.md") if title == "my_workflows.py"]
    lines = [line for line in code.splitlines() if line.strip() and "import " not in line]
    assert len(lines) <= 20


def test_the_scorer_that_is_shown_scores(blocks, tmp_path):
    [code] = [code for _, title, code in blocks("workflows.md") if title == "my_scorers.py"]
    (tmp_path / "my_scorers.py").write_text(code)
    spec = importlib.util.spec_from_file_location("my_scorers", tmp_path / "my_scorers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    prompt = Prompt(prompt_id="1", data_set="train", fields={"answer": "4"})
    assert module.brief(prompt, "4").parts == {"right": 1.0}


def test_the_keys_of_a_workflow_are_those_of_a_recipe(blocks):
    [shown] = [yaml.safe_load(code) for kind, _, code in blocks("workflows.md") if kind == "yaml"]
    fields = Recipe.model_fields["workflows"].annotation.__args__[1].model_fields
    assert shown["workflows"]["retry"].keys() <= fields.keys()
