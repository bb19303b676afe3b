import pytest
import yaml

from astraflow.config.recipe import DataSet, WorkflowConfig
from astraflow.workflows.environments.workflow import EnvironmentWorkflow
from astraflow.workflows.registry import _BUILT_IN, Kind


@pytest.mark.slow
def test_the_environment_that_is_shown_is_played(run_example):
    assert "1 passed" in run_example("environments.md")


def test_the_recipe_that_is_shown_can_be_read(blocks):
    [shown] = [
        yaml.safe_load(code) for kind, _, code in blocks("environments.md") if kind == "yaml"
    ]
    for settings in shown["data"].values():
        DataSet(**settings)
    workflow = WorkflowConfig(**shown["workflows"]["play"])
    EnvironmentWorkflow.Options(**workflow.options)


def test_every_environment_and_option_is_told(page):
    told = page("environments.md")
    names = [*_BUILT_IN[Kind.ENVIRONMENT], *EnvironmentWorkflow.Options.model_fields]
    assert [name for name in names if f"`{name}" not in told] == []
