import logging

import pytest
import structlog

from astraflow.config.recipe import Recipe
from astraflow.raas.main import main_join


@pytest.fixture
def join(tmp_path):
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
        log = tmp_path / "raas.log"
        code = main_join(recipe, hub="127.0.0.1:1", token="t", log_file=log)
        return code, log.read_text()

    handlers = logging.getLogger().handlers[:]
    yield run
    for handler in logging.getLogger().handlers[:]:
        if handler not in handlers:
            logging.getLogger().removeHandler(handler)
            handler.close()
    for handler in handlers:
        if handler not in logging.getLogger().handlers:
            logging.getLogger().addHandler(handler)
    structlog.reset_defaults()


def test_a_warm_up_model_must_be_given(join):
    code, log = join(model={"warm_up": {"tutor": "letter_sort"}})
    assert code == 1
    assert "--model solver=DIR" in log


def test_a_folder_without_a_model_is_named(join, tmp_path):
    code, log = join(model={"path": str(tmp_path / "missing")})
    assert code == 1
    assert "missing has no config.json" in log
