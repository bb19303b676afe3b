import pytest

from astraflow.config.recipe import Recipe
from astraflow.core.errors import CONFIGURATION_EXIT
from astraflow.raas.main import main_join


@pytest.fixture
def join(capfd):
    """Runs the process entry in this process; returns its exit code and its log."""

    def run(**policy):
        recipe = Recipe.model_validate(
            {
                "name": "tiny",
                "policies": {"solver": policy},
                "data": {"train": {"path": "train.jsonl"}},
                "workflows": {"main": {"name": "single_turn", "scorer": "exact"}},
                "rollouts": {"data_set": "train", "workflow": "main"},
            }
        )
        code = main_join(recipe, hub="127.0.0.1:1", token="t")
        return code, capfd.readouterr().err

    return run


def test_a_warm_up_model_must_be_given(join):
    code, log = join(model={"warm_up": {"tutor": "letter_sort:SortTutor"}})
    assert code == CONFIGURATION_EXIT
    assert "--model solver=DIR" in log


def test_a_folder_without_a_model_is_named(join, tmp_path):
    code, log = join(model={"path": str(tmp_path / "missing")})
    assert code == CONFIGURATION_EXIT
    assert "missing has no config.json" in log
