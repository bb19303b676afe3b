from astraflow.workflows.environments.workflow import EnvironmentWorkflow
from astraflow.workflows.registry import _BUILT_IN, Kind


def test_every_environment_and_option_is_told(page):
    told = page("environments.md")
    names = [*_BUILT_IN[Kind.ENVIRONMENT], *EnvironmentWorkflow.Options.model_fields]
    assert [name for name in names if f"`{name}" not in told] == []
