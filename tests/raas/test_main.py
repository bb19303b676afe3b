import pytest

from astraflow.core.errors import CONFIGURATION_EXIT
from astraflow.raas.main import main_join
from astraflow.testing import small_recipe


@pytest.fixture
def join(capfd, tmp_path):
    """Runs the process entry in this process; returns its exit code and its log."""

    def run(**policy):
        recipe = small_recipe(tmp_path, scorer="exact", changes={"policies.solver": policy})
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
