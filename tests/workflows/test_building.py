from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from astraflow.config.loader import load_recipe
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import Prompt, RegisteredCode
from astraflow.telemetry.tracebacks import place_of
from astraflow.workflows.building import build_workflows, close_workflows, workflow_specs

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def spec():
    return workflow_specs(load_recipe(RECIPES[0].with_name("sort.yaml")))[0]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_workflows_of_every_recipe_can_be_made(path):
    recipe = load_recipe(path)
    made = build_workflows(workflow_specs(recipe))
    assert list(made) == list(recipe.workflows)
    assert all(len(loaded.scorer_digest) == 32 for loaded in made.values())


def test_a_spec_names_its_policies_and_its_code(spec):
    assert spec.policy_ids == ("solver",)
    assert spec.scorer.name == "letter_sort:LetterSort"
    assert len(spec.code.code_digest) == len(spec.scorer.code_digest) == 32


def test_other_code_than_the_runs_is_refused(spec):
    other = replace(spec, code=RegisteredCode(name="single_turn", code_digest=b"x" * 32))
    with pytest.raises(AstraflowError) as caught:
        build_workflows([other])
    assert caught.value.reason is Reason.CODE_MISMATCH


def test_an_empty_digest_is_not_compared(spec):
    assert build_workflows([replace(spec, code=RegisteredCode(name="single_turn"))])


@pytest.mark.slow
async def test_the_processes_of_a_scorer_end_with_its_workflow(spec):
    kept = {"scorer": RegisteredCode(name="process"), "scorer_options": {"scorer": "exact"}}
    made = build_workflows([replace(spec, **kept)])
    (loaded,) = made.values()
    prompt = Prompt(prompt_id="1", data_set="d", fields={"answer": "42"})
    assert (await loaded.workflow._scorer(prompt, "42")).reward == 1.0
    before = psutil.Process().children()
    await close_workflows(made.values())
    gone, alive = psutil.wait_procs(before, timeout=10)
    assert gone
    assert not alive


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"options": {"templat": "x"}}, "workflows.sort.options: templat: unknown key"),
        ({"scorer_options": {"feld": "x"}}, "workflows.sort.scorer_options: feld: unknown key"),
        ({"scorer": None}, "workflows.sort: this workflow needs a scorer"),
    ],
)
def test_bad_options_are_named(spec, changes, said):
    with pytest.raises(AstraflowError) as caught:
        build_workflows([replace(spec, **changes)])
    assert caught.value.reason is Reason.INVALID_FIELD
    assert said in caught.value.message


class Broken:
    """Raises when it is made."""

    def __init__(self, *_):
        raise KeyError("no such file")


def test_code_that_raises_when_it_is_made_is_named(spec):
    code = RegisteredCode(name=f"{__name__}:Broken")
    for changes in ({"code": code, "options": {}}, {"scorer": code, "scorer_options": {}}):
        with pytest.raises(
            AstraflowError, match="Broken raised KeyError when it was made"
        ) as error:
            build_workflows([replace(spec, **changes)])
        assert error.value.reason is Reason.INVALID_FIELD


def test_a_module_that_raises_is_named(spec, tmp_path, monkeypatch):
    (tmp_path / "broken_module_of_a_user.py").write_text("import os\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = RegisteredCode(name="broken_module_of_a_user:Workflow")
    with pytest.raises(AstraflowError, match="its module raised ZeroDivisionError") as caught:
        build_workflows([replace(spec, code=code)])
    assert caught.value.reason is Reason.CODE_UNKNOWN
    assert place_of(caught.value).cause == "ZeroDivisionError at broken_module_of_a_user.py:2"
